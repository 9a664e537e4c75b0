"""Perplexity of a causal language model on windows of token ids, as an `evaluate` measurement."""

import datasets
import evaluate
import torch

from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.probe.engine import Workload

_DESCRIPTION = (
    "Perplexity: exp of the mean next-token loss, in nats, inside windows of token ids. The first token of a window is "
    "not predicted, and nothing is carried from one window to the next."
)


class Perplexity(evaluate.Measurement):
    """`evaluate.load(metrics.path("perplexity")).compute(input_ids=windows, model=model)`."""

    def _info(self) -> evaluate.MeasurementInfo:
        return evaluate.MeasurementInfo(
            module_type="measurement",
            description=_DESCRIPTION,
            citation="",
            inputs_description="input_ids: windows of token ids; model: a model; batch_size: windows in a pass.",
            features=datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, input_ids, model, batch_size=4):
        windows = torch.as_tensor(input_ids)
        batches = [{"input_ids": part} for part in windows.split(batch_size)]
        result = measure(Workload(model, batches, progress=False))
        return {"perplexity": result.perplexity, "loss": result.loss, "tokens": result.terms}
