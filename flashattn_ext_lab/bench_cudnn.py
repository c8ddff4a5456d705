"""cuDNN's forward in fp8, which PyTorch does not call: through NVIDIA's module `cudnn` (the package nvidia-cudnn-frontend)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# cuDNN multiplies weights, which are at most 1, by it before it rounds them to e4m3, as our kernels do.
WEIGHT_SCALE = 256.0


def attention(cudnn: ModuleType, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out of q, k and v [B, S, H, D] in e4m3 with descales of 1. It is e4m3 too: on Hopper cuDNN has no wider one."""
    views = [t.transpose(1, 2) for t in (q, k, v)]
    shapes = tuple((tuple(t.shape), t.stride()) for t in views)
    return _plan(cudnn, causal, shapes, q.device)(*views).transpose(1, 2)


@functools.lru_cache(maxsize=4)
def _plan(
    cudnn: ModuleType, causal: bool, shapes: tuple[Any, ...], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The call for q, k and v [B, H, S, D] of these sizes and strides. cuDNN takes a second to compile it."""
    handle = _handle(cudnn, device)
    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, handle=handle
    )
    inputs = [
        graph.tensor(name=name, dim=list(size), stride=list(stride), data_type=kind.FP8_E4M3)
        for name, (size, stride) in zip("qkv", shapes, strict=True)
    ]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    ones = [1, 1, 1, 1]
    scales = {name: graph.tensor(name=name, dim=ones, stride=ones, data_type=kind.FLOAT) for name in names}
    size = shapes[0][0]
    out, _, largest_weight, largest_out = graph.sdpa_fp8(
        *inputs, **scales, attn_scale=size[-1] ** -0.5, use_causal_mask=causal, generate_stats=False
    )
    out.set_output(True).set_dim(list(size)).set_stride(_rows_first(size)).set_data_type(kind.FP8_E4M3)
    for largest in (largest_weight, largest_out):
        largest.set_output(True).set_dim(ones).set_stride(ones).set_data_type(kind.FLOAT)
    graph.build([cudnn.heur_mode.A])

    values = dict.fromkeys(names, 1.0) | {"scale_s": WEIGHT_SCALE, "descale_s": 1 / WEIGHT_SCALE}
    constants = {scales[name]: torch.full(ones, value, device=device) for name, value in values.items()}
    constants |= {largest: torch.zeros(ones, device=device) for largest in (largest_weight, largest_out)}
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)

    def run(*views: Tensor) -> Tensor:
        B, H, S, D = size
        result = torch.empty(B, S, H, D, dtype=views[0].dtype, device=device).transpose(1, 2)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        tensors = {**dict(zip(inputs, views, strict=True)), **constants, out: result}
        graph.execute(tensors, workspace, handle=handle)
        return result

    return run


@functools.cache
def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


def _rows_first(size: tuple[int, ...]) -> list[int]:
    """Strides of [B, H, S, D] in memory of the order [B, S, H, D]."""
    _, H, S, D = size
    return [S * H * D, D, H * D, 1]
