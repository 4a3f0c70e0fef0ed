"""The runs of the protocol, in the order of `make bench`: the only commands that are recorded in results."""

from benchmarks.harness.registered import Run

_LLAMA_MODES = "adam,onebit_adam,zero_one_adam,zeropp"
_BYTES_MODES = f"{_LLAMA_MODES},zero_one_adam_16"
_MUON_MODES = "adam,adam@2,adam@4,muon,muon@2,muon@4"  # AdamW and Muon at the best of their rates
_TO_THE_END = ("--minutes", "1200")

# Model, ranks, tokens, accumulation and minutes of step times beyond those of step-34m and step-239m. These
# have 2 ranks, 128 tokens and no accumulation, and one rank against the plain loop.
_STEPS = (
    ("34m", 1, 128, 1, 6),
    ("34m", 1, 128, 4, 5),
    ("34m", 1, 1024, 1, 14),
    ("34m", 1, 1024, 4, 17),
    ("34m", 2, 128, 4, 8),
    ("34m", 2, 1024, 1, 20),
    ("34m", 2, 1024, 4, 25),
    ("34m", 4, 128, 1, 20),
    ("34m", 4, 128, 4, 16),
    ("34m", 4, 1024, 1, 45),
    ("34m", 4, 1024, 4, 60),
    ("239m", 1, 128, 1, 25),
    ("239m", 1, 128, 4, 22),
    ("239m", 1, 1024, 1, 80),
    ("239m", 2, 128, 4, 40),
)
# DDP and stage 1 with the activations of 1,024 tokens need more memory than the machine of the protocol has.
_SHARDED = "stage3,stage2,stage3-gloo,stage2-gloo,fsdp2,fsdp2-keep,deepspeed2,deepspeed3"


def _step(model: str, ranks: int, tokens: int, accumulation: int, minutes: float, *selection: str) -> Run:
    sizes = {"ranks": ranks, "tokens": tokens, "accumulation": accumulation}
    arguments = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    name = "-".join([model, *(f"{name}-{size}" for name, size in sizes.items())])
    return Run(f"step/{name}", "step", ("--models", model, *arguments, *selection), minutes)


RUNS = (
    Run("adam", "adam", minutes=1, quick=True),
    Run("lamb", "lamb", minutes=0.5, quick=True),
    Run("compression", "compression", ("--threads", "1"), minutes=1, quick=True),
    Run("overlap", "overlap", minutes=0.5, quick=True),
    Run("host_time", "host_time", minutes=0.5, quick=True),
    Run("plan", "plan", minutes=0.5, quick=True),
    Run("staging", "staging", minutes=1, quick=True),
    Run("scale", "scale", minutes=6),
    Run("layouts", "layouts", minutes=1, quick=True),
    Run("muon_nvme", "muon_nvme", minutes=1, quick=True),
    Run("checkpoint", "checkpoint", minutes=6),
    Run("step-34m", "step", ("--models", "34m"), minutes=8),
    Run("compute_share", "compute_share", ("--models", "34m,239m"), minutes=10),
    Run("compute_share-34m-1024", "compute_share", ("--models", "34m", "--tokens", "1024"), minutes=6),
    Run("compute_share-239m-512", "compute_share", ("--models", "239m", "--tokens", "512"), minutes=15),
    Run("trainer", "trainer", ("--models", "34m"), minutes=9),
    Run("muon", "muon", ("--models", "34m"), minutes=6),
    Run("monitor", "monitor", minutes=5),
    Run("steady", "steady", minutes=3, quick=True),
    Run("load", "load", minutes=3),
    Run("compressed", "compressed", ("--what", "8m-bytes"), minutes=6),
    Run("long_context", "long_context", minutes=5),
    Run("aio", "aio", minutes=5),
    Run("activation", "activation", minutes=11),
    Run("layer_major", "layer_major", minutes=12),
    Run("attention", "attention", minutes=13),
    Run("inference", "inference", minutes=16),
    Run("bloom", "bloom", minutes=10),
    Run("capped", "capped", ("--only", "model"), minutes=10),
    Run("capped_length", "capped", ("--only", "length"), minutes=10),
    Run("capped_context", "capped", ("--only", "context"), minutes=60),
    Run("huge", "huge", minutes=10),
    Run("offload", "offload", ("--models", "239m"), minutes=25),
    Run("memory", "memory", ("--models", "34m,239m"), minutes=20),
    Run("tune", "tune", minutes=20),
    Run("parallel", "parallel", minutes=45),
    Run("parallel_equality", "parallel_equality", minutes=30),
    Run("muon-239m", "muon", ("--models", "239m"), minutes=45),
    Run("step-239m", "step", ("--models", "239m"), minutes=60),
    *(_step(*each) for each in _STEPS),
    _step("239m", 2, 1024, 1, 150, "--only", _SHARDED),
    Run("long_sequence", "long_sequence", minutes=110),
    Run("long_quality", "long_quality", minutes=120),
    Run("convergence/8m-bytes", "convergence", ("--modes", _BYTES_MODES, *_TO_THE_END), minutes=200),
    Run(
        "convergence/34m",
        "convergence",
        ("--what", "34m", "--modes", _LLAMA_MODES, "--seeds", "1", *_TO_THE_END),
        minutes=90,
    ),
    Run(
        "convergence/muon",
        "convergence",
        ("--what", "8m-bytes-half", "--modes", _MUON_MODES, "--seeds", "1", *_TO_THE_END),
        minutes=50,
    ),
    # It reads other results, so it is last.
    Run("simulation", "simulation", minutes=1),
)
