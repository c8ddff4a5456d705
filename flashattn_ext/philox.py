"""The generator of dropout (docs/dropout.md) in torch operators, for the reference."""

from __future__ import annotations

from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def philox_key(seed: int, offset: int) -> tuple[int, int]:
    """SplitMix64's finaliser; docs/dropout.md."""
    x = (seed & _MASK64) ^ (offset * 0x9E3779B97F4A7C15 & _MASK64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    x ^= x >> 31
    return x & _MASK32, x >> 32


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32-bit word of constant * x, for 32-bit words in int64, without overflowing 63 bits."""
    low_part = (constant & 0xFFFF) * x
    high_part = (constant >> 16) * x + (low_part >> 16)
    return high_part >> 16, (high_part & 0xFFFF) << 16 | low_part & 0xFFFF


def philox(key: tuple[int, int], counter: list[Tensor]) -> list[Tensor]:
    """Philox4x32 with 7 rounds (Salmon et al., SC 2011); words are int64 tensors below 2^32."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(7):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9 & _MASK32, k1 + 0xBB67AE85 & _MASK32
    return [c0, c1, c2, c3]
