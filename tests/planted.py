"""A training loop with faults that can be planted in it, each on a line with a comment that names it."""

from __future__ import annotations

import inspect
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradprobe_hf.profiling import Schedule, profiled

SHORT = Schedule(warmup=2, timed=3, traced=1, located=3)
WIDTH = 192


class Rows(Dataset):
    def __init__(self, sleep=0.0):
        self.sleep, self.slept = sleep, []

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if self.sleep:
            start = time.perf_counter()
            time.sleep(self.sleep)
            self.slept.append(time.perf_counter() - start)
        return torch.full((WIDTH,), index / 4096)


class Net(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fault = fault

    def forward(self, x):
        if self.fault == "constant tensor":
            x = x + torch.triu(torch.ones(WIDTH, WIDTH), diagonal=1).mean()  # constant tensor
        if self.fault == "cast of a weight":
            x = x + self.layers[0].weight.to(torch.float64).mean().to(x.dtype)  # cast of a weight
        if self.fault == "float32 product":
            x = x + (x.float() @ x.float().T).mean().to(x.dtype)  # float32 product
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def forget_compilations():
    """Lines are not looked for where something was compiled, by another test say."""
    if "torch._dynamo.utils" in sys.modules:
        torch._dynamo.utils.clear_compilation_metrics()


def norm_of(model):
    total = 0.0
    for parameter in model.parameters():
        total = total + parameter.grad.detach().norm() ** 2  # norms one by one
    return total


def train(fault="", steps=64, schedule=SHORT, batch_size=64, rows=None, save=None, at_end=None):
    """The report of a loop; `at_end` is called with the step number at the end of each step."""
    torch.manual_seed(0)
    model = Net(fault).to(torch.bfloat16 if fault == "float32 product" else torch.float32)
    trained = list(model.layers[1:].parameters() if fault == "gradient without optimizer" else model.parameters())
    if fault == "parameter without gradient":
        trained.append(nn.Parameter(torch.zeros(3)))
    optimizer = torch.optim.AdamW(trained, fused=fault != "optimizer")
    with profiled(schedule=schedule, save=save) as profiler:
        for step, batch in enumerate(DataLoader(rows or Rows(), batch_size)):  # data loading
            loss = model(batch.to(next(model.parameters()).dtype)).square().mean()
            loss.backward()
            if fault == "norms one by one":
                norm_of(model)
            if fault == "synchronization":
                loss.item()  # synchronization
            if fault == "print":
                print(loss)  # print
            optimizer.step()  # optimizer, parameter without gradient, gradient without optimizer
            optimizer.zero_grad(set_to_none=fault != "zeroed gradients")  # zeroed gradients
            if at_end:
                at_end(step)
            if profiler.done or step == steps:
                break
    return profiler.report()


def line_of(fault):
    """Where a fault stands."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if fault in line.partition("  # ")[2].split(", "))
