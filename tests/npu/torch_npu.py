"""`import torch_npu`, for a process that knows nothing of the stand-in: it gets the NPU of device.cpp."""

import device  # noqa: F401
