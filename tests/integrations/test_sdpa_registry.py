"""sdpa.activate() and sdpa.restore(): torch's registry of attention implementations is as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("torch is older than 2.10, which has no registry of attention implementations", allow_module_level=True)

from flashattn_ext.integrations import sdpa


class RegistryOf210:
    """torch 2.10's registry: activating adds an implementation, and nothing ends one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl", raising=False)
        for name in ("register", "activate", "current", "list"):
            suffix = "impls" if name == "list" else "impl"
            monkeypatch.setattr(torch.nn.attention, f"{name}_flash_attention_{suffix}", getattr(self, name))
        self.private = torch.nn.attention._registry
        monkeypatch.setattr(self.private, "_FLASH_ATTENTION_IMPLS", self.known)
        monkeypatch.setattr(self.private, "_FLASH_ATTENTION_HANDLES", self.handles, raising=False)
        monkeypatch.setattr(self.private, "_FLASH_ATTENTION_ACTIVE", None)

    def register(self, name: str, *, register_fn: Any) -> None:
        self.known[name] = register_fn

    def activate(self, name: str) -> None:
        if self.current() != name:
            self.handles[name] = self.known[name]()
            self.private._FLASH_ATTENTION_ACTIVE = name

    def current(self) -> str | None:
        active: str | None = self.private._FLASH_ATTENTION_ACTIVE
        return active

    def list(self) -> list[str]:
        return sorted(self.known)


@pytest.fixture(params=["the installed torch", "torch 2.10"])
def registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "torch 2.10":
        RegistryOf210(monkeypatch)
    yield torch.nn.attention
    sdpa.restore()  # while the registry is the one that was activated in


def _state() -> Any:
    q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    names = torch.nn.attention.current_flash_attention_impl(), torch.nn.attention.list_flash_attention_impls()
    return (
        *names,
        torch._C._dispatch_dump("aten::scaled_dot_product_attention"),
        F.scaled_dot_product_attention(q, q, q).sum(),
    )


def test_restore_leaves_torch_as_it_was(registry: Any) -> None:
    before = _state()
    sdpa.activate()
    assert registry.current_flash_attention_impl() == sdpa.NAME
    assert _state() != before
    sdpa.restore()
    assert _state() == before
    with pytest.raises(ZeroDivisionError), sdpa.activate():
        raise ZeroDivisionError
    assert _state() == before
    sdpa.restore()  # harmless


def test_activating_twice_is_harmless(registry: Any) -> None:
    before = _state()
    with sdpa.activate(report=True) as outer:
        q = torch.randn(1, 1, 4, 8)
        F.scaled_dot_product_attention(q, q, q)
        with sdpa.activate(report=True) as inner:
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    assert (outer.ours, inner.ours) == (2, 1)
    assert _state() == before
    sdpa.activate()
    sdpa.activate()
    sdpa.restore()
    assert _state() == before


def test_an_activation_is_in_force_in_every_with_block(registry: Any) -> None:
    """The second block was silently inactive."""
    before, q = _state(), torch.randn(1, 1, 4, 8)
    activation = sdpa.activate(report=True)
    for count in (1, 2, 3):
        with activation as report:
            assert sdpa._is_active()
            F.scaled_dot_product_attention(q, q, q)
        assert report is not None and report.ours == count
        assert _state() == before
    sdpa.activate()
    sdpa.restore()
    with activation, activation, sdpa.activate() as other:
        with activation:
            F.scaled_dot_product_attention(q, q, q)
        assert other is None and sdpa._is_active()
        F.scaled_dot_product_attention(q, q, q)  # counted by no report
    assert activation.report is not None and activation.report.ours == 4
    assert _state() == before
    ended = sdpa.activate()
    sdpa.restore()
    with ended:
        assert sdpa._is_active()
    assert _state() == before


class Handle:
    """What another implementation leaves with torch's registry."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self) -> None:
        self.removed = True


def end_the_other(registry: Any) -> None:
    if not hasattr(registry, "restore_flash_attention_impl"):
        torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE = None
    elif registry.current_flash_attention_impl():
        registry.restore_flash_attention_impl()
    sdpa._forget("another")


def test_another_implementation_is_active_again_afterwards(registry: Any) -> None:
    before = _state()
    registry.register_flash_attention_impl("another", register_fn=Handle)
    registry.activate_flash_attention_impl("another")
    try:
        with sdpa.activate():
            assert registry.current_flash_attention_impl() == sdpa.NAME
        assert registry.current_flash_attention_impl() == "another"
        assert _state()[2:] == before[2:]
        sdpa.activate()
        if hasattr(registry, "restore_flash_attention_impl"):
            registry.restore_flash_attention_impl()  # torch's own function ends it, too
            assert not sdpa._is_active()
    finally:
        sdpa.restore()
        end_the_other(registry)


def test_an_implementation_that_was_activated_later(registry: Any) -> None:
    """This module's kernel is removed all the same, and activating it again does not leave the first one behind."""
    before = _state()
    registry.register_flash_attention_impl("another", register_fn=Handle)
    try:
        for again in (False, True):
            sdpa.activate()
            registry.activate_flash_attention_impl("another")
            assert not sdpa._is_active()
            if again:
                sdpa.activate()
                assert sdpa._is_active()
            sdpa.restore()
            assert registry.current_flash_attention_impl() == "another"
            assert _state()[2:] == before[2:]
    finally:
        end_the_other(registry)


def test_a_torch_without_the_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"torch 2\.10 or newer.*got torch " + torch.__version__.split("+")[0]):
        sdpa.activate()
    monkeypatch.undo()
