"""Perplexity of a causal language model on windows of token ids, as an `evaluate` measurement."""

import datasets
import evaluate
import torch

from gradprobe_hf.data.batches import from_rows
from gradprobe_hf.data.text.packing import rows_of
from gradprobe_hf.data.text.special_tokens import special_tokens
from gradprobe_hf.evaluation.perplexity import measure
from gradprobe_hf.model.loading.processing import load_processing_class
from gradprobe_hf.probe.engine import Workload

_DESCRIPTION = (
    "Perplexity: exp of the mean next-token loss, in nats, inside windows of token ids. The first token of a window is "
    "not predicted, and nothing is carried from one window to the next. Windows begin as the tokenizer begins a text: "
    "where they do not, a BOS say is put before each, and then their first token is predicted, too."
)
_INPUTS = (
    "input_ids: windows of token ids; model: a model; batch_size: windows in a pass; processing_class: the tokenizer, "
    "by default the one beside the model; add_special_tokens: False takes windows as they are."
)


class Perplexity(evaluate.Measurement):
    """`evaluate.load(metrics.path("perplexity")).compute(input_ids=windows, model=model)`."""

    def _info(self) -> evaluate.MeasurementInfo:
        return evaluate.MeasurementInfo(
            module_type="measurement",
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, input_ids, model, batch_size=4, processing_class=None, add_special_tokens=True):
        windows = torch.as_tensor(input_ids)
        tokenizer = (processing_class or load_processing_class(model)) if add_special_tokens else None
        special = special_tokens(tokenizer, model, wanted=tokenizer is not None)
        if not special.begin(windows):
            windows = special.around(windows)
        batches = from_rows(rows_of(windows, special.unpredicted), batch_size, 0, source="", protocol="")
        result = measure(Workload(model, batches, progress=False))
        return {"perplexity": result.perplexity, "loss": result.loss, "tokens": result.terms}
