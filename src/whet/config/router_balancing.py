"""What keeps the routers of a model with experts in balance."""

from pydantic import Field

from whet.config.section import Section


class RouterBalancing(Section):
    """Models with experts: what keeps their routers in balance, whatever the objective."""

    load_balancing: float = Field(
        0.0, ge=0, description="weight of the load-balancing loss, which is a mean over micro-batches"
    )
    z_loss: float = Field(0.0, ge=0, description="weight of the loss on large logits of routers")
    bias_rate: float = Field(
        0.0, ge=0, description="change of each expert's bias after a step, towards an even load; no loss"
    )
