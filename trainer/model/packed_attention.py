"""Attention over packed rows: each branch sees itself and its prefix, and no other branch.

On a CPU the blocks of a row are computed one by one with torch's flash kernels and merged by their
log-sum-exp, so no mask exists. On CUDA it is torch's flex attention, which gets the tiles of the
same blocks. A row of one branch needs no structure: its attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clawstream.runtime.logs import logger
from clawstream.trainer.data.packing import Block, PackedRow
from clawstream.trainer.vision.inputs import has_vision

if TYPE_CHECKING:
    from clawstream.schemas.settings import TrainerSettings

NAME = "packed"
"""Of this attention in transformers."""
Structure = tuple[Block, ...] | BlockMask
_TILE = 128
"""Queries, and keys, of a tile of flex attention: its default, and a multiple of what it needs."""
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments with which some models change the attention."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Arrived(Exception):
    """The attention of a model got the structure of a row."""


_PROBE: tuple[Block, ...] = (Block((0, 0), (0, 0), False),)
"""Stands for a structure; the attention that gets it raises `_Arrived`."""


def use_packing(model: PreTrainedModel, settings: TrainerSettings) -> bool:
    """Let a model take packed rows, if the settings ask for it and its layers allow it.

    Returns:
        Whether it does. It takes padded rows in any case.
    """
    if settings.packing == "rows":
        return False
    reason = not_packable(model)
    if reason is None:
        own = model.config._attn_implementation
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)
        reason = _lost_structure(model)
        if reason is None:
            return True
        model.set_attn_implementation(own)
    logger().info("packing_off", model=type(model).__name__, reason=reason)
    return False


def not_packable(model: PreTrainedModel) -> str | None:
    """Return why a model cannot take packed rows; None if it can.

    In a packed row the tokens before a token are not all its own. Only layers that see a token
    through attention to the whole prefix can tell them apart.
    """
    config = model.config
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    other = sorted({*(layers or ())} - {"full_attention"})
    if other:
        return f"layers with {', '.join(other)}"
    if layers is None and getattr(text, "sliding_window", None) is not None:
        return "layers with a sliding window"
    if getattr(text, "attention_chunk_size", None) is not None:
        return "layers with chunked attention"
    if getattr(text, "v_head_dim", None) is not None:
        return "heads whose values have another width than their keys"
    if has_vision(config):
        return "positions of images"
    if model._is_stateful:
        return "recurrent layers"
    if not model._can_set_attn_implementation():
        return "an attention of its own"
    return None


@torch.no_grad()
def _lost_structure(model: PreTrainedModel) -> str | None:
    """Return why the structure of a row does not reach the attention; None if it does.

    Without it, the tokens of a row would attend to other branches. Weights do not matter.
    """
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    try:
        model(input_ids=token, use_cache=False, structure=_PROBE)
    except _Arrived:
        return None
    except (TypeError, ValueError) as e:
        return str(e)
    return "layers that do not hand arguments to their attention"


def structure_of(row: PackedRow, device: torch.device) -> Structure | None:
    """Return the structure of a row in the form that `packed_attention` takes on a device.

    Returns:
        None for a row of one branch, whose attention is causal.
    """
    if len(row.blocks) == 1:
        return None
    return row.blocks if device.type != "cuda" else block_mask(row.ends, device)


def block_mask(ends: NDArray[np.int64], device: torch.device) -> BlockMask:
    """Return the structure of a row as flex attention takes it.

    It equals that of torch's `create_block_mask`, which would compute each pair of query and key.
    Left of the diagonal, a tile has a visible pair if one of its keys ends behind its first query,
    and only visible pairs if none ends before its last one.

    Args:
        ends: of a `PackedRow`, shape (tokens,).
        device: of the tensors.
    """
    starts = np.arange(0, len(ends), _TILE)
    first_query = starts[:, np.newaxis]  # tiles have the shape (of queries, of keys)
    left = starts < first_query
    some = left & (np.maximum.reduceat(ends, starts) > first_query)
    # In an unfinished last tile of queries, no end is so high: it is never full.
    full = left & (np.minimum.reduceat(ends, starts) >= first_query + _TILE)
    partial = some & ~full | np.eye(len(starts), dtype=bool)
    end_of = torch.from_numpy(ends).to(device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_of[key])

    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=_TILE,
        mask_mod=visible,
        seq_lengths=(len(ends), len(ends)),
    )


def _listed(tiles: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each tile of queries the number of its tiles of keys, and their indexes first.

    Returns:
        int32, shapes (1, 1, tiles) and (1, 1, tiles, tiles).
    """
    indexes = np.argsort(~tiles, axis=-1, kind="stable")
    found = (tiles.sum(-1, dtype=np.int32), indexes.astype(np.int32))
    number, order = (torch.from_numpy(part).to(device)[None, None] for part in found)
    return number, order


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    structure: Structure | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, as transformers' `AttentionInterface` asks for it.

    Args:
        module: the layer.
        query: (1, heads, tokens, width); key, value: (1, heads or fewer, tokens, width).
        attention_mask: None; transformers builds none for this attention.
        scaling: of the scores.
        dropout: 0.
        structure: of the packed row; None: rows that are causal.
        others: ignored, but arguments that change the attention are refused.

    Returns:
        (1, tokens, heads, width), and no weights.

    Raises:
        ValueError: the model changes the attention in a way that is not supported.
    """
    if changed := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise ValueError(f"attention with {', '.join(changed)}")
    if structure is _PROBE:
        raise _Arrived
    if structure is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling
        )
        return output, None
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(structure, BlockMask):
        output, _ = flex_attention_forward(module, query, key, value, structure, scaling=scaling)
        return output, None
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    output = PackedAttention.apply(query, key, value, structure, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


class PackedAttention(torch.autograd.Function):
    """Blocks of attention merged by their log-sum-exp.

    The backward pass of flash attention computes the softmax from the log-sum-exp that it is given.
    With that of all blocks of a query, the gradient of each block is exact.
    Source: Dao et al., FlashAttention, arXiv 2205.14135, algorithm 4.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        output = torch.empty_like(query)
        normalizers = torch.empty(query.shape[:3], dtype=torch.float32)
        for block in blocks:
            q, k, v = _parts(block, query, key, value)
            found, found_normalizers = _flash(q, k, v, 0.0, block.causal, scale=scale)
            at = slice(*block.queries)
            if block.causal:  # the first one of its queries
                output[:, :, at], normalizers[:, :, at] = found, found_normalizers
                continue
            before = normalizers[:, :, at]
            merged = torch.logaddexp(before, found_normalizers)
            output[:, :, at].mul_((before - merged).exp().unsqueeze(-1))
            output[:, :, at].add_(found * (found_normalizers - merged).exp().unsqueeze(-1))
            normalizers[:, :, at] = merged
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalizers = ctx.saved_tensors
        d_query, d_key, d_value = (torch.zeros_like(t) for t in (query, key, value))
        for block in ctx.blocks:
            q, k, v = _parts(block, query, key, value)
            at, keys = slice(*block.queries), slice(*block.keys)
            found = _flash_backward(
                *(gradients[0][:, :, at], q, k, v, output[:, :, at], normalizers[:, :, at]),
                *(0.0, block.causal),
                scale=ctx.scale,
            )
            for total, place, part in zip(
                (d_query, d_key, d_value), (at, keys, keys), found, strict=True
            ):
                total[:, :, place] += part
        return d_query, d_key, d_value, None, None


def _parts(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    keys = slice(*block.keys)
    return query[:, :, slice(*block.queries)], key[:, :, keys], value[:, :, keys]
