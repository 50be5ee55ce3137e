import gc
import weakref

import torch
from deepseek_v41_models import tiny_config

from blockdraft.modeling.deepseek_v41.token_plan import TokenPlan


def test_a_plan_ends_with_its_forward():
    """Its masks are as large as queries times keys: they do not wait for the garbage collector."""
    gc.disable()
    try:
        plan = TokenPlan(tiny_config(), 5, 0, None, torch.device("cpu"), is_cached=False)
        mask = weakref.ref(plan.window(5))
        assert plan.to("cpu") is plan and plan.to("meta") is plan.to("meta")
        del plan
        assert mask() is None
    finally:
        gc.enable()
