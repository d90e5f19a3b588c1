"""The `experts` section: load balancing of mixture-of-experts routers."""

from pydantic import Field

from whet.config.section import Section


class RouterBalancing(Section):
    """Router load balancing in mixture-of-experts models, for every objective."""

    load_balancing: float = Field(
        0.0, ge=0, description="weight of the load-balancing loss, a mean over micro-batches; 0: off"
    )
    z_loss: float = Field(
        0.0, ge=0, description="weight of the router z-loss, which penalizes large logits; 0: off"
    )
    bias_rate: float = Field(
        0.0,
        ge=0,
        description="auxiliary-loss-free balancing: change of each expert's router bias per step; 0: off",
    )
