"""The slow obvious way: one sequence at a time, torch.autograd for gradients, Python loops over tokens."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F


def shrunk_copy(model, masks=None, factor=1.0):
    """A float64 copy whose masked weights really are multiplied by the factor. Masks are `[out, in]`."""
    from transformers.pytorch_utils import Conv1D

    copied = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for name, mask in (masks or {}).items():
            parameter = copied.get_parameter(name)
            owner = copied.get_submodule(name.rsplit(".", 1)[0])
            mask = mask.t() if isinstance(owner, Conv1D) else mask
            parameter[mask] *= factor
    return copied


def sequence_loss(model, row):
    """Summed loss of one row, written out without the package's loss."""
    if model.config.is_encoder_decoder:
        output = model(**row)
        return F.cross_entropy(output.logits[0], row["labels"][0], reduction="sum")
    output = model(**{name: value for name, value in row.items() if name != "labels"})
    if "pixel_values" in row:
        return F.cross_entropy(output.logits, row["labels"], reduction="sum")
    if "labels" in row:
        return F.cross_entropy(output.logits[0], row["labels"][0], reduction="sum")
    return F.cross_entropy(output.logits[0, :-1], row["input_ids"][0, 1:], reduction="sum")


def statistics(model, rows, names, masks=None, factor=1.0, before=None, limit=2.0):
    """S, T, K, peak and the inputs' energy of every named matrix, `[out, in]`, in float64, and the total loss.

    With the statistics of another model as `before`, a row's gradient that has more than `limit` times the energy it
    had there is scaled down to that.
    """
    from transformers.pytorch_utils import Conv1D

    model = shrunk_copy(model, masks, factor)
    found = {name: {"sequence": 0, "token": 0, "peak": 0, "d_sq": 0, "x_sq": 0, "energies": []} for name in names}
    total = 0.0
    for index, row in enumerate(rows):
        row = {key: value.double() if value.is_floating_point() else value for key, value in row.items()}
        caught = {}
        handles = []
        for name in names:
            module = model.get_submodule(name.rsplit(".", 1)[0])

            def hook(_module, args, output, name=name, caught=caught):
                output.retain_grad()
                caught.setdefault(name, []).append((args[0].detach(), output))

            handles.append(module.register_forward_hook(hook))
        model.zero_grad()
        loss = sequence_loss(model, row)
        loss.backward()
        gradients = [model.get_parameter(name).grad.clone() for name in names]
        total += float(loss.detach())
        for handle in handles:
            handle.remove()
        for name, gradient in zip(names, gradients, strict=True):
            conv1d = isinstance(model.get_submodule(name.rsplit(".", 1)[0]), Conv1D)
            gradient = gradient.t() if conv1d else gradient
            kept = found[name]
            energy = sum(float((output.grad**2).sum()) for _, output in caught[name])
            kept["energies"].append(energy)
            allowed = energy if before is None else limit * before[name]["energies"][index]
            scale = min(1.0, (allowed / energy) ** 0.5) if energy else 1.0
            gradient = gradient * scale
            kept["sequence"] = kept["sequence"] + gradient**2
            kept["peak"] = torch.maximum(torch.as_tensor(kept["peak"], dtype=torch.float64), gradient.abs())
            for x, output in caught[name]:
                x, d = x.reshape(-1, x.shape[-1]), scale * output.grad.reshape(-1, output.shape[-1])
                for x_t, d_t in zip(x, d, strict=True):
                    kept["token"] = kept["token"] + torch.outer(d_t**2, x_t**2)
                    kept["d_sq"] = kept["d_sq"] + d_t**2
                    kept["x_sq"] = kept["x_sq"] + x_t**2
    for kept in found.values():
        kept["factored"] = torch.outer(kept["d_sq"], kept["x_sq"])
    return found, total
