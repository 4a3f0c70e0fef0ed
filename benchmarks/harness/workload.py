"""What each rank of a run does in a step: how many ranks there are, tokens of a micro-batch, accumulation."""

from dataclasses import dataclass, replace

from benchmarks.harness.shapes import BATCH_SIZE, SEQUENCE_LENGTH, LlamaShape, Shape
from benchmarks.peers import Contender

CORES = 2
LONGEST = 2048  # positions of the Llamas
# Families with a step of several micro-batches, and those that have to be configured for it.
ACCUMULATING = ("plain", "compute", "ddp", "fsdp2", "deepspeed", "zero_ext")
CONFIGURED = ("deepspeed", "zero_ext")
ACCUMULATED_BYTES = 4.0  # of a parameter, for gradients that wait for the last micro-batch


@dataclass(frozen=True)
class Workload:
    """Properties of a registered run that are the same for every contender.

    `ranks` is None for those that each contender has by itself. `tokens` is the length of the one sequence
    of a micro-batch, `accumulation` the number of micro-batches of a step.
    """

    ranks: int | None = None
    tokens: int = SEQUENCE_LENGTH
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks: expected at least 1, got {self.ranks}.")
        if not 2 <= self.tokens <= LONGEST:
            raise ValueError(f"tokens: expected 2 to {LONGEST}, got {self.tokens}.")
        if self.accumulation < 1:
            raise ValueError(f"accumulation: expected at least 1, got {self.accumulation}.")

    def applied_to(self, contender: Contender) -> Contender:
        """The contender with the ranks and the accumulation of this workload.

        Ranks divide the cores among them, with at least one thread each. The number of ranks in the
        key of a contender stays.

        Raises:
            ValueError: the family has no steps of several micro-batches.
        """
        if self.ranks is not None and "@" not in contender.key:
            contender = replace(contender, ranks=self.ranks, threads=max(1, CORES // self.ranks))
        if self.accumulation == 1:
            return contender
        if contender.family not in ACCUMULATING:
            raise ValueError(
                f"accumulation: expected a contender of {', '.join(ACCUMULATING)}, got {contender.key!r}. "
                "Measure it with an accumulation of 1."
            )
        needed = contender.bytes_per_parameter + ACCUMULATED_BYTES
        contender = replace(contender, bytes_per_parameter=needed)
        if contender.family not in CONFIGURED:
            return contender
        return replace(contender, options={**contender.options, "accumulation": self.accumulation})

    def activation_bytes(self, shape: Shape) -> int:
        """Rough bytes that a rank holds between forward and backward beyond those of `SEQUENCE_LENGTH`,
        which are within a contender's estimate per parameter."""
        if not isinstance(shape, LlamaShape):
            return 0
        # bfloat16: some 12 tensors as wide as the model and 4 as wide as the MLP in each layer. Logits are
        # there in bfloat16, and in float32 with their gradient and a copy.
        layer = 2 * (12 * shape.hidden + 4 * shape.feed_forward)
        token = shape.layers * layer + 14 * shape.vocabulary
        return max(0, self.tokens - SEQUENCE_LENGTH) * BATCH_SIZE * token

    def steps_of_round(self, micro_batches: int) -> int:
        """Return the measured steps of a contender in a round of about `micro_batches`."""
        return max(1, micro_batches // self.accumulation)

    def described(self) -> str:
        """Tokens, accumulation, ranks and threads, for the note of a table."""
        tokens = f"{BATCH_SIZE} × {self.tokens:,} tokens per rank and micro-batch"
        steps = f"{self.accumulation} micro-batch{'es' if self.accumulation > 1 else ''} per step"
        if self.ranks is None:
            return f"{tokens}, {steps}. 2 ranks of 1 thread, or 1 rank of 2 threads"
        threads = max(1, CORES // self.ranks)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{tokens}, {steps}. {ranks} of {threads} thread{'s' if threads > 1 else ''}"


DEFAULT_WORKLOAD = Workload()
