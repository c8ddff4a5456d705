"""Predicts what the exchanges of flashattn_ext.distributed cost on many GPUs: the table of docs/distributed.md.

    python tools/context_parallel_costs.py

Nothing is measured here. A rank computes its share at the rate of one GPU; what it sends goes at the rate of its links. The exchanges `ulysses`
and `allgather` send before and after they compute, `ring` sends while it computes and waits for what is slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashattn_ext.cli.bench_distributed import MODES, Case, sent_bytes


@dataclass(frozen=True)
class Machine:
    """Rates in units per second and GPU; the first three are what docs/results/h200_cuda.md and the bench measure."""

    forward_flops: float = 700e12
    backward_flops: float = 510e12
    copy_bytes: float = 1.6e12  # of a copy in memory, each byte read and written
    node: int = 8  # GPUs that NVLink connects
    node_bytes: float = 350e9  # sent by a GPU over NVLink
    network_bytes: float = 45e9  # sent by a GPU to other nodes
    message_s: float = 20e-6  # of one step of an exchange


def compute_s(case: Case, ranks: int, machine: Machine) -> float:
    flops = case.flops() / ranks
    return flops / machine.forward_flops + 2.5 * flops / machine.backward_flops


def send_s(sent: float, ranks: int, machine: Machine) -> float:
    """Where the ranks are on several nodes, what a GPU sends to other nodes goes over the network."""
    far = max(0, ranks - machine.node) / max(1, ranks - 1)
    return sent * (1 - far) / machine.node_bytes + sent * far / machine.network_bytes


def predicted_share(case: Case, mode: str, ranks: int, machine: Machine) -> float | None:
    """A GPU's rate over that of one GPU alone; None where the exchange is not possible."""
    if mode == "ulysses" and case.heads_q % ranks:
        return None
    compute = compute_s(case, ranks, machine)
    sent = sent_bytes(case, mode, 0, ranks)
    sending = send_s(sent, ranks, machine)
    rows = case.tokens / ranks * case.heads_q * case.head_dim * 2
    if mode == "ulysses":
        total = compute + sending + 4 * machine.message_s + 8 * rows / machine.copy_bytes  # packed and unpacked
    elif mode == "allgather":
        total = compute + sending + 3 * ranks * machine.message_s
    else:
        # Merging reads and writes float32 results once a step, in the forward and for dq.
        merging = ranks * 8 * rows / machine.copy_bytes
        total = max(compute + merging, sending) + 3 * ranks * machine.message_s
    return compute / total


def main() -> None:
    machine = Machine()
    print("| GPUs | tokens | " + " | ".join(MODES) + " | keys and values of all tokens |")
    print("| --- | --- |" + " --- |" * (len(MODES) + 1))
    for ranks in (8, 64, 512):
        for tokens in (2**17, 2**20, 2**22):
            case = Case(tokens, 32, 8, 128)
            shares = [predicted_share(case, mode, ranks, machine) for mode in MODES]
            gathered = tokens * 8 * 256 * 2
            cells = ["-" if share is None else f"{share:.0%}" for share in shares]
            print(f"| {ranks} | {tokens // 1024}k | " + " | ".join(cells) + f" | {gathered / 2**30:.1f} GiB |")


if __name__ == "__main__":
    main()
