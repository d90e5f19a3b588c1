"""What a run may cost."""

from pydantic import Field, model_validator

from whet.config.section import Section


class Budget(Section):
    """A run whose budget is spent is done: it is evaluated, and its result is in final/."""

    flops: float | None = Field(None, gt=0, description="floating-point operations of all steps together")
    minutes: float | None = Field(
        None, gt=0, description="minutes of all steps, pauses between stop and resume left out"
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> "Budget":
        if self.flops is None and self.minutes is None:
            raise ValueError("a budget needs flops, minutes or both")
        return self
