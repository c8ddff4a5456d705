"""Models of transformers with random weights, through each of its attentions: training steps and generate(), memory.

The models have the widths of real ones and fewer layers. No case starts after Sizes.seconds.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import io
import itertools
import pstats
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bench_cases import DTYPES, FA4, FLEX
from ..timing import burst_ms, reported, time_interleaved, wall_clock
from .harness import OURS, SDPA, Context, Measured, Sizes, size_table
from .llama import GIB, PEAK, RATE
from .render import write_json
from .result import NOT_MEASURED, Result, cell, labels, measured, number, quotient

EAGER = "eager"
# name in this table -> attn_implementation of transformers
ATTENTIONS = {OURS: "fax", SDPA: "sdpa", EAGER: "eager", FLEX: "flex_attention", FA4: "flash_attention_4"}
ON_CPU = (OURS, SDPA, EAGER)
IN_GENERATION = (OURS, SDPA, EAGER, FA4)  # FlexAttention compiles for several lengths before it accepts all of them
TRAINING, DECODING = "training step", "decoding step"
DYNAMIC, STATIC = "dynamic", "static"  # caches of generate(); transformers compiles the steps of a static one on a GPU
PROFILED = (OURS, EAGER)
MOST_LINES = 40  # of a profile


class Family(NamedTuple):
    """The configuration of a model: `widths` are divided by Sizes.shrink."""

    config: str
    widths: dict[str, int]
    others: dict[str, Any]
    peers: tuple[str, ...]


_WITHOUT_SDPA = (OURS, EAGER, FLEX, FA4)  # transformers refuses sdpa for softcaps and sinks
_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_GEMMA = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8}
_GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
}  # fmt: skip
FAMILIES = {
    "Llama": Family("LlamaConfig", _LLAMA, {"head_dim": 128}, tuple(ATTENTIONS)),
    "Gemma 2": Family("Gemma2Config", _GEMMA, {"head_dim": 256, "query_pre_attn_scalar": 256}, _WITHOUT_SDPA),
    "gpt-oss": Family("GptOssConfig", _GPT_OSS, {"head_dim": 64, "num_experts_per_tok": 4}, _WITHOUT_SDPA),
    # transformers lets the tokens of gpt-oss see other packed documents in eager and flex_attention.
    "gpt-oss D256": Family(
        "GptOssConfig", {**_GPT_OSS, "num_attention_heads": 16}, {"head_dim": 256, "num_experts_per_tok": 4}, (OURS, FA4)
    ),
}  # fmt: skip
# train: model, tokens, packed documents, layers. generate: model, batch, tokens of a prompt, cache, layers.
SIZES = size_table(
    gpu=dict(
        train=(
            ("Llama", 8192, 1, 4), ("Llama", 32768, 1, 4), ("Llama", 16384, 8, 4), ("Gemma 2", 8192, 1, 4), ("gpt-oss", 8192, 1, 2),
            ("gpt-oss D256", 16384, 8, 2),
        ),
        generate=(
            ("Llama", 8, 4096, DYNAMIC, 16), ("Llama", 1, 32768, DYNAMIC, 16), ("Gemma 2", 8, 4096, DYNAMIC, 21),
            ("gpt-oss", 8, 4096, DYNAMIC, 12), ("Llama", 8, 4096, STATIC, 16),
        ),
        new_tokens=33, rounds=5, generations=2, vocabulary=32768, shrink=1, dtype="bf16", seconds=600,
    ),
    gpu_quick=dict(
        train=(("Llama", 4096, 1, 2), ("Llama", 4096, 4, 2)), generate=(("Llama", 4, 1024, DYNAMIC, 4),), rounds=3
    ),
    cpu=dict(
        train=(("Llama", 1024, 1, 2), ("Llama", 1024, 4, 2), ("Gemma 2", 1024, 1, 2), ("gpt-oss", 1024, 1, 2), ("gpt-oss D256", 1024, 4, 2)),
        generate=(("Llama", 4, 512, DYNAMIC, 4), ("Llama", 4, 512, STATIC, 4), ("Gemma 2", 4, 512, DYNAMIC, 4), ("gpt-oss", 4, 512, DYNAMIC, 4)),
        new_tokens=9, rounds=3, vocabulary=1024, shrink=8, dtype="fp32",
    ),
    cpu_quick=dict(
        train=(("Llama", 128, 1, 1), ("gpt-oss", 128, 2, 2)), generate=(("Llama", 2, 64, DYNAMIC, 1), ("Gemma 2", 2, 64, STATIC, 2)),
        new_tokens=3, shrink=16,
    ),
)  # fmt: skip


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    deadline = time.monotonic() + sizes.seconds
    cases: list[Case] = [
        Case(TRAINING, *of) for of in ((m, 1, S, layers, documents) for m, S, documents, layers in sizes.train)
    ]
    cases += [Case(DECODING, m, B, S, layers, cache=cache) for m, B, S, cache, layers in sizes.generate]
    for case in context.track(cases):
        contest = Contest(context, sizes, case, deadline)
        contest.run()
        tokens = case.B * (case.S if case.what == TRAINING else 1)  # of one step
        for name in contest.names:
            result.add(
                *labels(what=case.what, model=case.model, case=case.text, layers=case.layers, attention=name),
                *contest.times.alone(name),
                cell("to ours", contest.times.ratio(name, OURS), "x", ".2f"),
                cell(RATE, contest.times.rate(tokens, name), "1/s", ".0f"),
                cell(PEAK, contest.peaks.get(name), "GiB", ".2f", 1 / GIB),
                contest.times.remark("all", name),
            )
        if context.out is not None:  # a run that is ended by a time limit keeps the cases that it has finished
            write_json(result, context.out / f"{result.name}.json")
    profiles = "; host profiles of decoding steps are in models_*.profile.txt" if context.out else ""
    result.notes += [
        "models of transformers with random weights, the widths of Llama 3.1 8B, Gemma 2 9B and gpt-oss 20B divided by `shrink`, and fewer "
        f"layers; a vocabulary of {sizes.vocabulary}. gpt-oss D256: gpt-oss with 16 heads of 256, trained with packed documents, which eager and "
        "flex_attention do not keep apart in gpt-oss",
        "training step: forward, backward and an update with AdamW, one row of tokens. decoding step: the median step of generate() after the "
        f"prompt, each with one more token for every row of the batch; attention_mask is given{profiles}",
        "attention: attn_implementation: ours is fax, flex is flex_attention, fa4 is flash_attention_4. They take turns, except with a "
        f"static cache, where transformers compiles the steps on a GPU. {PEAK}: by PyTorch's allocator on CUDA only, with weights, optimizer "
        "and KV cache",
    ]


def compare(result: Result) -> None:
    for what in (TRAINING, DECODING):
        for model, case in dict.fromkeys(
            zip(result.column("model", what=what), result.column("case", what=what), strict=True)
        ):
            where: dict[str, Any] = {"what": what, "model": model, "case": case}
            ours = measured(result, "time", attention=OURS, **where)
            timed = {
                name: measured(result, "time", attention=name, **where) for name in result.column("attention", **where)
            }
            others = {name: figure for name, figure in timed.items() if figure is not None and name != OURS}
            fastest = min(others, key=lambda name: others[name].value, default="")
            if fastest:
                result.compare(
                    f"{what} of {model}, {case}, {fastest} relative to ours", quotient(others[fastest], ours)
                )
            elif ours is None:
                result.compare(f"{what} of {model}, {case}", NOT_MEASURED)
            memory = (number(result.value(PEAK, attention=name, **where), ".1f", " GiB") for name in (fastest, OURS))
            if fastest and result.value(PEAK, attention=OURS, **where) is not None:
                result.compare(f"{PEAK} of that, {fastest} to ours, measured once", " to ".join(memory))


@dataclass(frozen=True)
class Case:
    """One model and one use of it. documents: packed into each row; cache: of generate()."""

    what: str
    model: str
    B: int
    S: int
    layers: int
    documents: int = 1
    cache: str = DYNAMIC

    @property
    def text(self) -> str:
        rows = f"{self.B}x{self.S}" + (f", {self.documents} documents" if self.documents > 1 else "")
        return rows + (", static cache" if self.cache == STATIC else "")


@dataclass
class Contest:
    """The attentions of one case, in turns on one model. After run() `times`, `peaks` (bytes) and their failures are filled in."""

    context: Context
    sizes: Sizes
    case: Case
    deadline: float
    times: Measured = field(default_factory=lambda: Measured({}))
    peaks: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        names = FAMILIES[self.case.model].peers
        names = tuple(name for name in names if name in IN_GENERATION or self.case.what == TRAINING)
        return [name for name in names if name in ON_CPU or not self.context.on_cpu]

    def run(self) -> None:
        with reported("all", self.times.failures):
            self._run()
        self._free()

    def _run(self) -> None:
        model = make_model(self.context.device, self.sizes, self.case)
        use = (
            Training(model, self.sizes, self.case)
            if self.case.what == TRAINING
            else Generation(model, self.sizes, self.case)
        )
        # The steps of each attention with a static cache are compiled, which is repeated for each, so that they follow each other.
        groups = [[name] for name in self.names] if self.case.cache == STATIC else [self.names]
        for names in groups:
            torch.compiler.reset()  # FlexAttention would compile the second shape for shapes of any size, which is slower
            self.times.timings |= time_interleaved(
                {name: use.run for name in names}, budget_s=0.0, min_rounds=use.rounds, failures=self.times.failures,
                clock=use.seconds, around=lambda name: self._through(name, model),
            )  # fmt: skip
        if self.context.out is not None and isinstance(use, Generation):
            for name in (name for name in PROFILED if name in self.times.timings and self.case.cache == DYNAMIC):
                model.set_attn_implementation(ATTENTIONS[name])
                path = (
                    self.context.out / f"models_{file_name(f'{self.case.model} {self.case.text} {name}')}.profile.txt"
                )
                path.write_text(use.profile(), encoding="utf-8")

    @contextlib.contextmanager
    def _through(self, name: str, model: Any) -> Iterator[None]:
        """Calls of the model in this context go through an attention. Reads the memory that they need."""
        if name not in self.started and time.monotonic() > self.deadline:
            raise TimeoutError(f"left out, because the {self.sizes.seconds} seconds of this experiment were over")
        self.started.add(name)
        model.set_attn_implementation(ATTENTIONS[name])
        if self.context.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        except torch.OutOfMemoryError:
            self._free()
            raise MemoryError("out of memory") from None
        if self.context.on_cuda:
            self.peaks[name] = torch.cuda.max_memory_allocated()

    def _free(self) -> None:
        gc.collect()
        if self.context.on_cuda:
            torch.cuda.empty_cache()


def make_model(device: torch.device, sizes: Sizes, case: Case) -> Any:
    """A model of transformers with random weights, in memory of the device.

    Raises:
        ImportError: transformers is not installed.
    """
    from flashattn_ext.integrations import transformers as fax

    fax.register()
    import transformers

    of_transformers: Any = transformers
    of_transformers.logging.set_verbosity_error()  # it warns about every attention but eager, for some models
    family = FAMILIES[case.model]
    widths = {name: max(width // sizes.shrink, 1) for name, width in family.widths.items()}
    if "num_local_experts" in widths:
        widths["num_local_experts"] = max(widths["num_local_experts"], family.others["num_experts_per_tok"])
    config = getattr(of_transformers, family.config)(
        **widths, **family.others, num_hidden_layers=case.layers, vocab_size=sizes.vocabulary, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, max_position_embeddings=1 << 16,
    )  # fmt: skip
    with device:
        return of_transformers.AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[sizes.dtype], attn_implementation=EAGER
        )


class Training:
    """Steps of one row of tokens, which may be several documents."""

    def __init__(self, model: Any, sizes: Sizes, case: Case) -> None:
        self.model, self.rounds = model.train(), sizes.rounds
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        tokens = random_tokens(model.device, sizes, 1, case.S)
        self.inputs = {
            "input_ids": tokens,
            "labels": tokens,
            "position_ids": positions(case.S, case.documents, model.device),
        }
        if case.documents == 1:
            del self.inputs["position_ids"]

    def run(self) -> None:
        try:
            self.model(**self.inputs, use_cache=False).loss.backward()
            self.optimizer.step()
        finally:
            self.model.zero_grad(set_to_none=True)

    def seconds(self, step: Callable[[], object]) -> float:
        return burst_ms(step, 1) * 1e-3 if self.model.device.type == "cuda" else wall_clock(step)


class Generation:
    """generate() with prompts of one length; seconds() are those of its median step."""

    def __init__(self, model: Any, sizes: Sizes, case: Case) -> None:
        self.model, self.new_tokens, self.rounds = model.eval(), sizes.new_tokens, sizes.generations
        self.prompts = random_tokens(model.device, sizes, case.B, case.S)
        self.cache = {} if case.cache == DYNAMIC else {"cache_implementation": "static"}
        self.marks = Marks(model.device)

    def run(self) -> Tensor:
        """The prompts with the new tokens."""
        tokens: Tensor = self.model.generate(
            self.prompts, attention_mask=torch.ones_like(self.prompts), max_new_tokens=self.new_tokens, do_sample=False,
            logits_processor=[self.marks], **self.cache,
        )  # fmt: skip
        return tokens

    def seconds(self, generate: Callable[[], object]) -> float:
        self.marks.clear()
        generate()
        return self.marks.median_s()

    def profile(self) -> str:
        """The functions of the host during the steps after the prompt: those that take the most time themselves, and with what they call."""
        self.marks.clear()
        self.marks.profiler = cProfile.Profile()
        try:
            self.run()
        finally:
            self.marks.profiler.disable()
            text = io.StringIO()
            stats = pstats.Stats(self.marks.profiler, stream=text).strip_dirs()
            self.marks.profiler = None
        print(f"{self.new_tokens - 1} steps\n", file=text)
        for order in ("tottime", "cumtime"):
            stats.sort_stats(order).print_stats(MOST_LINES)
        return text.getvalue()


class Marks:
    """A logits processor that changes nothing: it notes when each step has its logits."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.profiler: cProfile.Profile | None = None  # begins with the first step after the prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.marks.append(self._now())
        if self.profiler is not None and len(self.marks) == 1:
            self.profiler.enable()
        return scores

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def clear(self) -> None:
        self.marks.clear()

    def median_s(self) -> float:
        """Seconds of the median step."""
        pairs = list(itertools.pairwise(self.marks))
        if not self.on_cuda:
            return float(statistics.median(after - before for before, after in pairs))
        torch.cuda.synchronize()
        return float(statistics.median(before.elapsed_time(after) for before, after in pairs)) * 1e-3


def random_tokens(device: torch.device, sizes: Sizes, B: int, S: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, sizes.vocabulary, (B, S), generator=generator).to(device)  # neither padding nor a beginning


def positions(S: int, documents: int, device: torch.device) -> Tensor:
    """int64 [1, S]: positions within documents, the last of which has twice the tokens of the first, the others in between."""
    weights = torch.linspace(1, 2, documents)
    ends = (weights.cumsum(0) / weights.sum() * S).round().long()
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)


def file_name(text: str) -> str:
    return re.sub(r"[^\w]+", "_", text).strip("_")
