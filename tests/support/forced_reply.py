"""A logits processor of vLLM: a request names the ids of its reply.

    --logits-processors support.forced_reply:ForcedReply
    {"vllm_xargs": {"reply_ids": [5, 6, 7]}, ...}

A model with random weights then calls tools and reasons as a trained one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedReply(AdapterLogitsProcessor):  # type: ignore[misc]
    """Gives the whole probability to the next id of `reply_ids`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor] | None:
        ids = (params.extra_args or {}).get("reply_ids")
        if ids is None:
            return None

        def forced(sampled: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            chosen = int(ids[min(len(sampled), len(ids) - 1)])
            mask = torch.full_like(logits, float("-inf"))
            mask[chosen] = logits[chosen]
            return mask

        return forced
