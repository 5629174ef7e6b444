"""Estimates the time of a step on 8 to 4096 processes: the model behind docs/scaling.md. Nothing here is measured but its inputs.

    python benches/scaling.py

A step is computation, the exchange of outputs (methods whose loss sees the global batch), that loss, and the reduction of the gradient; nothing overlaps, as in the engine today.
Images a process stay the same (weak scaling). With N bytes of gradient in buckets of 25 MB, P processes, a message's latency a and a bandwidth b of each process:

    canonical   2 (P - 1) a + 2 (P - 1) / P (bucket / b) + copies and additions          each process sends its part of a bucket to every other one, twice
    fast        2 log2(P) a + 2 (P - 1) / P (bucket / b) + copies and additions          Rabenseifner's all-reduce, which MPI libraries take for such sizes
    gather      (P - 1) a + (P - 1) / P (outputs / b)
    loss        6 (2 B)^2 D operations for B images of the global batch: every rank evaluates it whole

Copies and additions run at `LOCAL` bytes of gradient a second, measured by benches/reduce on one machine, where messages are copies too.
"""

from math import ceil, log2

BUCKET = 25e6
# benches/reduce, 350 MB, 2 processes of one machine, two cores: 0.69 s canonical, 0.37 s fast
LOCAL = {"canonical": 350e6 / 0.69, "fast": 350e6 / 0.37}

# name, seconds of computation, images a process, bytes of gradient, width of the outputs in a global loss (0: none), operations a second of that loss
WORKLOADS = [
    ("SimCLR, ResNet-18 (CIFAR stem), 2 cores a process, 64 images of 32 px", 64 / 106.0, 64, 4 * 11.2e6, 128, 2.5e11),
    ("MAE, ViT-S/16, 2 cores a process, 16 images of 224 px", 16 / 7.5, 16, 4 * 22e6, 0, 0),
]
# name, latency in s, bandwidth in bytes/s
LINKS = [("10 Gbit/s Ethernet", 30e-6, 1.25e9), ("100 Gbit/s InfiniBand", 2e-6, 12.5e9)]


def reduction(kind, processes, size, latency, bandwidth):
    steps = 2 * (processes - 1) if kind == "canonical" else 2 * log2(processes)
    moved = 2 * (processes - 1) / processes * size / bandwidth
    return ceil(size / BUCKET) * steps * latency + moved + size / LOCAL[kind]


for workload, compute, images, size, width, rate in WORKLOADS:
    for link, latency, bandwidth in LINKS:
        print(f"\n{workload}; {link} (latency {latency * 1e6:.0f} us)\n")
        print("| processes | global batch | canonical, s | fast, s | gather and loss, s | efficiency, canonical | fast |")
        print("|---|---|---|---|---|---|---|")
        for processes in [2**power for power in range(3, 13)]:
            batch = images * processes
            shared = 0.0
            if width:
                outputs = 2 * batch * width * 4
                shared = (processes - 1) * latency + outputs / bandwidth + 6 * (2 * batch) ** 2 * width / rate
            times = [reduction(kind, processes, size, latency, bandwidth) for kind in ("canonical", "fast")]
            efficiency = [100 * compute / (compute + shared + time) for time in times]
            shown = f"{shared:.3f}" if width else "-"
            print(f"| {processes} | {batch} | {times[0]:.3f} | {times[1]:.3f} | {shown} | {efficiency[0]:.0f} % | {efficiency[1]:.0f} % |")
