"""The public surface: names, keyword names and defaults, build_info, use_backend."""

from __future__ import annotations

import ast
import inspect
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_ext
from flashattn_ext import calls, decode
from flashattn_ext.options import OPTIONS as OPTIONS_OF_OPS
from flashattn_ext.options import ConvertedOptions

OPTIONS = {
    "causal": False,
    "window_size": (-1, -1),
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "relative_bias": None,
    "bias": None,
    "mask": None,
    "dropout_p": 0.0,
    "smooth_softmax": False,
    "sink": None,
    "deterministic": False,
    "invariant": False,
    "rng_seed": None,
    "descale_q": None,
    "descale_k": None,
    "descale_v": None,
    "out_dtype": None,
    "return_lse": False,
    "return_max_logits": False,
}


def test_public_names() -> None:
    """Users can import exactly the names that the package declares, and each one has a docstring."""
    members = {name: getattr(flashattn_ext, name) for name in dir(flashattn_ext) if not name.startswith("_")}
    modules = {name for name, member in members.items() if inspect.ismodule(member)}
    assert flashattn_ext.__all__ == sorted(members.keys() - modules)
    assert all(inspect.getdoc(members[name]) for name in flashattn_ext.__all__)


@pytest.mark.parametrize("name", ["forward", "varlen_forward", "attention_reference"])
def test_options_have_the_same_names_and_defaults_everywhere(name: str) -> None:
    parameters = inspect.signature(getattr(flashattn_ext, name)).parameters
    expected = dict(OPTIONS)
    if name != "varlen_forward":
        expected["layout"] = "bshd"
    if name == "attention_reference":
        del expected["deterministic"], expected["invariant"]
    assert expected.items() <= {key: p.default for key, p in parameters.items()}.items()


def test_attention_weights_has_every_option_but_dropout_and_fp8() -> None:
    parameters = inspect.signature(flashattn_ext.attention_weights).parameters
    not_of_weights = {
        "dropout_p",
        "rng_seed",
        "deterministic",
        "invariant",
        "return_lse",
        "return_max_logits",
        "out_dtype",
    }
    not_of_weights |= {"descale_q", "descale_k", "descale_v"}
    expected = {name: default for name, default in OPTIONS.items() if name not in not_of_weights} | {
        "layout": "bshd",
        "origin": None,
    }
    assert expected == {name: p.default for name, p in parameters.items() if name not in ("q", "k", "rows")}


# What a user passes for each option, and the fields of the ops' arguments that hold it then.
GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (True, {"causal": True}),
    "window_size": ((3, 5), {"window_left": 3, "window_right": 5}),
    "softmax_scale": (0.25, {"softmax_scale": 0.25}),
    "softcap": (7.0, {"softcap": 7.0}),
    "dropout_p": (0.5, {"dropout_p": 0.5}),
    "smooth_softmax": (True, {"smooth_softmax": True}),
    "deterministic": (True, {"deterministic": True}),
    "invariant": (True, {"invariant": True}),
    "origin": ((1, 2), {"origin": [1, 2]}),
    "out_dtype": (torch.float16, {"out_dtype": torch.float16}),
    **{
        name: (tensor := torch.full((1,), float(i)), {name: tensor})
        for i, name in enumerate(
            ("sink", "alibi_slopes", "relative_bias", "bias", "descale_q", "descale_k", "descale_v")
        )
    },
}


def test_every_option_has_one_default_and_a_type() -> None:
    keywords = {
        p.name: p.default for p in inspect.signature(calls.convert).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    assert keywords.keys() == ConvertedOptions.__annotations__.keys() == GIVEN.keys() | {"mask"}
    described = {option.name: option.default for option in OPTIONS_OF_OPS if option.name in keywords}
    assert described.pop("softmax_scale") == 1 and keywords["softmax_scale"] is None
    assert described.items() <= keywords.items()


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_reaches_the_field_of_its_name(name: str) -> None:
    """calls.convert() and decode._convert() give the ops their arguments by position."""
    q, (value, expected) = torch.zeros(1, 1, 1, 4), GIVEN[name]
    lengths = (torch.tensor([2]), torch.tensor([3]), 4, 5)
    expected = (
        dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True)) | expected
    )
    fields = {option.name: option.default for option in OPTIONS_OF_OPS} | {"softmax_scale": 0.5} | expected
    tensors, numbers = calls.convert("forward", q, q, q, lengths, "bhsd", **{name: value})
    got = tensors._asdict() | numbers._asdict()
    assert all(got.pop(each) is q for each in "qkv") and got.pop("bhsd") is True and fields.pop("bhsd") is False
    assert same(got, fields)
    decoded = {option.name: fields[option.name] for option in OPTIONS_OF_OPS if option.decodes}
    if expected.keys() <= decoded.keys():
        assert same(dict(zip(decoded, decode._convert(q, lengths, **{name: value}), strict=True)), decoded)


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(got) == list(expected) and all(
        a is b if isinstance(b, torch.Tensor) else a == b for a, b in zip(got.values(), expected.values(), strict=True)
    )


def test_version() -> None:
    assert flashattn_ext.__version__ == flashattn_ext.build_info()["version"]


def test_build_info() -> None:
    info = flashattn_ext.build_info()
    assert "cpu" in info["backends"]
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["cpu_isa"] in info["cpu_isas"] and "generic" in info["cpu_isas"]
    assert info["compiler"]
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        assert info["cpu"].startswith(named[1].strip())


@pytest.fixture
def free_choice_afterwards():
    yield
    flashattn_ext.use_backend(None)


needs_emulator = pytest.mark.skipif(
    not Path(flashattn_ext.__file__).with_name("_ascend_emulator.so").exists(),
    reason="the emulator is not built (make emulator)",
)


def backend_of_cpu_tensors() -> str:
    """The backend that a call on CPU tensors runs on: the emulator says its name when it refuses fp64."""
    q = torch.randn(1, 5, 1, 8, dtype=torch.float64)
    try:
        flashattn_ext.forward(q, q, q)
    except (NotImplementedError, TypeError) as error:
        assert "ascend-emulator" in str(error)
        return "ascend-emulator"
    return "cpu"


@needs_emulator
def test_use_backend_as_a_function(free_choice_afterwards: None) -> None:
    assert backend_of_cpu_tensors() == "cpu"
    flashattn_ext.use_backend("ascend-emulator")
    assert backend_of_cpu_tensors() == "ascend-emulator"
    flashattn_ext.use_backend(None)
    assert backend_of_cpu_tensors() == "cpu"


@needs_emulator
def test_use_backend_as_a_context_manager(free_choice_afterwards: None) -> None:
    with flashattn_ext.use_backend("ascend-emulator"):
        assert backend_of_cpu_tensors() == "ascend-emulator"
        with flashattn_ext.use_backend(None):
            assert backend_of_cpu_tensors() == "cpu"
        assert backend_of_cpu_tensors() == "ascend-emulator"
    with pytest.raises(ZeroDivisionError), flashattn_ext.use_backend("ascend-emulator"):
        raise ZeroDivisionError  # the block's own error passes through
    assert backend_of_cpu_tensors() == "cpu"


@pytest.mark.parametrize("name", ["cuda-sm999", "CPU", "gpu"])
def test_unknown_backend(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*cpu"):
        flashattn_ext.use_backend(name)
    with pytest.raises(ValueError, match="backend"), flashattn_ext.use_backend(name):
        pass


def test_backend_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="int"):
        flashattn_ext.use_backend(3)


def test_ops_are_registered() -> None:
    for name in ("forward", "backward", "dropout_mask"):
        assert isinstance(getattr(torch.ops.flashattn_ext, name).default, torch._ops.OpOverload)


def test_the_library_does_not_import_its_command_line() -> None:
    """Also not where the import fails: the command line finds out by itself."""
    package = Path(flashattn_ext.__file__).parent
    for path in set(package.glob("*.py")) - {package / "__main__.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or "" if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not any("cli" in name.split(".") for name in (module, *names)), path
