"""PyTorch's side of benches/ops.rs: reads `repeats operation sizes...` lines, answers with milliseconds forward and backward on one thread."""

import statistics
import sys
import time

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)


leaves = []


def leaf(*shape, scale=1.0):
    leaves.append((torch.randn(shape) * scale).requires_grad_())
    return leaves[-1]


def conv(batch, size, ins, outs, kernel, stride):
    x, w = leaf(batch, ins, size, size), leaf(outs, ins, kernel, kernel, scale=0.05)
    return lambda: F.conv2d(x, w, stride=stride, padding=kernel // 2)


def batch_norm(batch, size, channels, residual):
    x, gamma, beta = leaf(batch, channels, size, size), leaf(channels), leaf(channels)
    norm = lambda: F.batch_norm(x, None, None, gamma, beta, training=True)
    if not residual:
        return lambda: F.relu(norm(), inplace=True)
    extra = leaf(batch, channels, size, size)
    return lambda: F.relu(norm().add_(extra), inplace=True)


def max_pool(batch, size, channels):
    x = leaf(batch, channels, size, size)
    return lambda: F.max_pool2d(x, 3, 2, 1)


def linear(rows, ins, outs, after=""):
    x, w, b, residual = leaf(rows, ins), leaf(outs, ins, scale=0.05), leaf(outs), leaf(rows, outs)
    if after == "gelu":
        return lambda: F.gelu(F.linear(x, w, b))
    if after == "residual":
        return lambda: F.linear(x, w, b) + residual
    return lambda: F.linear(x, w, b)


def mlp(rows, dim, hidden):
    x, residual = leaf(rows, dim), leaf(rows, dim)
    w1, b1, w2, b2 = leaf(hidden, dim, scale=0.05), leaf(hidden), leaf(dim, hidden, scale=0.05), leaf(dim)
    return lambda: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2) + residual


def layer_norm(rows, dim):
    x, gamma, beta = leaf(rows, dim), leaf(dim), leaf(dim)
    return lambda: F.layer_norm(x, (dim,), gamma, beta, 1e-6)


def attention(batch, tokens, width, heads):
    qkv = leaf(batch, tokens, 3 * width)

    def run():
        q, k, v = qkv.view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)

    return run


for line in sys.stdin:
    repeats, name, *sizes = line.split()
    name, _, after = name.partition("+")
    sizes = [int(size) for size in sizes]
    leaves.clear()
    run = globals()[name](*sizes, **({"after": after} if after else {}))
    probe = torch.randn_like(run())
    forward, backward = [], []
    for _ in range(int(repeats) + 1):
        start = time.thread_time()
        y = run()
        middle = time.thread_time()
        torch.autograd.grad(y, leaves, probe, allow_unused=True)
        forward.append(middle - start)
        backward.append(time.thread_time() - middle)
        del y  # outside of what is timed
    print(1e3 * statistics.median(forward[1:]), 1e3 * statistics.median(backward[1:]), flush=True)
