"""The table of tasks. To add one: a function that makes a batch of rows, unless one here does, and a row.

Nothing of transformers is imported before it is asked for: the configuration and the command line read the names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradprobe_hf.tasks.columns import (
    AUDIO,
    IMAGE,
    TEXT,
    WORDS,
    ColumnKind,
    Row,
    find_chat,
    find_column,
    find_label,
    find_pair,
)
from gradprobe_hf.tasks.embeddings import predicted_embeddings
from gradprobe_hf.tasks.media_batches import (
    classified_images,
    classified_recordings,
    images_alone,
    images_with_captions,
    images_with_text,
    transcribed_speech,
)
from gradprobe_hf.tasks.metrics import METRICS, Compared, Metric
from gradprobe_hf.tasks.predictions import (
    Predicted,
    predicted_labels,
    predicted_next,
    transcribed,
    written_texts,
)
from gradprobe_hf.tasks.row_reader import RowReader
from gradprobe_hf.tasks.text_batches import classified_texts, classified_words, masked_tokens, texts_to_write


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is known by task.

    Attributes:
        name: as the Hub calls it; the pipeline tag of a card.
        auto_class: of transformers, that loads a model for it.
        mapping: of `transformers.models.auto.modeling_auto`: the classes that are for it.
        among: further such mappings; only types of models that are in one of these, too. Empty: all.
        objective: as transformers names its losses; what the classes of such models end with.
        inputs: the kinds of column that go in.
        labels: names that a column of labels usually has; none: rows need no labels.
        label_is_optional: whether a column of labels is read only if it is named.
        one_label: whether a row has one label: a class, or a measure.
        batch_of: rows of a data set -> what the model is called with; None: text alone is cut into windows, and any
            other data has to come as batches.
        prepared: what rows have to hold, where none but those that are prepared can be read; "": any.
        prepare: a batch of tokens -> what the model is called with, where those alone have no loss.
        embeds: whether it is for the embeddings of texts or images, whose labels are the model's own.
        row: what the report calls a row.
        term: what the loss is a mean over.
        predict: model, batch and processing class -> predictions and references; None: no metric is known.
        compares: what kind of predictions these are.
        has_classes: whether a model has a distribution of classes, or tokens, where each label is: logits of the
            labels' shape, and one more dimension. Then it can be trained towards another's.
        default_metric: measured where there are labels; None: the loss says enough.
        snippet: how the model is used, for the card; `{where}` stands for its name. "": it is only loaded.
        chat_snippet: the same of a model that is talked to.
    """

    name: str
    auto_class: str
    mapping: str
    among: tuple[str, ...] = ()
    objective: str
    inputs: tuple[ColumnKind, ...] = ()
    labels: tuple[str, ...] = ()
    label_is_optional: bool = False
    one_label: bool = False
    batch_of: Callable[[Sequence[Row], RowReader], dict[str, Any]] | None = None
    prepared: str = ""
    prepare: Callable[[Mapping[str, Any], RowReader], dict[str, Any]] | None = None
    embeds: bool = False
    row: str = "examples"
    term: str = "examples"
    predict: Callable[[Any, Mapping[str, Any], Any], Predicted] | None = None
    compares: Compared = "labels"
    has_classes: bool = False
    default_metric: str | None = None
    snippet: str = ""
    chat_snippet: str = ""

    @property
    def auto(self) -> Any:
        """The Auto class."""
        import transformers

        return getattr(transformers, self.auto_class)

    @property
    def classes(self) -> frozenset[str]:
        """The names of the classes that are for it."""
        from transformers.models.auto import modeling_auto

        mapping: Mapping[str, str | tuple[str, ...]] = getattr(modeling_auto, self.mapping)
        types = set().union(*(getattr(modeling_auto, one) for one in self.among or (self.mapping,)))
        found = [one for kind, one in mapping.items() if kind in types]
        return frozenset(name for one in found for name in ([one] if isinstance(one, str) else one))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that fit its predictions."""
        if self.predict is None:
            return ()
        return tuple(name for name, metric in METRICS.items() if metric.compares == self.compares)

    @property
    def cuts_windows(self) -> bool:
        """Whether text alone is its data, cut into windows."""
        return self.batch_of is None and self.inputs == (TEXT,)

    @property
    def medium(self) -> ColumnKind | None:
        """What it reads beside text, which it may also be given alone."""
        may_be_alone = TEXT in self.inputs and not self.embeds  # a pair has two embeddings
        return next((kind for kind in self.inputs if kind is not TEXT), None) if may_be_alone else None

    @property
    def takes_text_alone(self) -> bool:
        """Whether text without anything beside it can be its data, cut into windows."""
        return self.cuts_windows or self.medium is not None

    @property
    def writes_label(self) -> bool:
        """Whether a label is a text that the model is to write."""
        return self.compares == "texts" or self.label_is_optional

    @property
    def data(self) -> str:
        """What a data set for it holds, for errors."""
        return f"rows of {self.row}" if self.embeds else "rows with labels"

    def reads(self, first: Row) -> bool:
        """Whether a data set with such rows is made into batches here, and not cut into windows of text."""
        if self.batch_of is None:
            return False
        return self.medium is None or self.medium.is_in(first)

    def columns(
        self, first: Row, text_column: str | None = None, label_column: str | None = None
    ) -> tuple[tuple[str, ...], str | None]:
        """The columns of what goes in, and that of the labels.

        Args:
            text_column: the one with the text; two, with a comma between them, for pairs of texts.

        Raises:
            ValueError: there is no such column, or none to be found.
        """
        label = None
        if label_column is not None or (self.labels and not self.label_is_optional):
            label = find_label(first, self.labels, label_column)
        if self.inputs == (TEXT,) and self.one_label and (pair := find_pair(first, text_column)) is not None:
            return pair, label
        found: list[str] = []
        for kind in self.inputs:
            named = text_column if kind in (TEXT, WORDS) else None
            if kind is TEXT and self.medium is not None and named is None:  # what is said of an image may be a chat
                named = find_chat(first)
            found.append(find_column(first, kind, named, apart=[*found, *([label] if label else [])]))
        return tuple(found), label

    def check_length(self, asked: int | None, main_input: str) -> None:
        """Raise ValueError for a `sequence_length` where no text is read or written that could be cut at it.

        Args:
            main_input: the model's `main_input_name`: one that reads tokens can be given text, whatever it is for.
        """
        has_text = TEXT in self.inputs or self.predict is written_texts or main_input == "input_ids"
        if asked is not None and not has_text:
            raise ValueError(
                f"sequence_length={asked} has no effect here: for {self.name} no text is cut. Leave sequence_length "
                "unset."
            )

    def metric(self, name: str) -> Metric:
        """A metric of this task.

        Raises:
            ValueError: one that its predictions cannot be judged by.
        """
        if name not in self.metrics:
            known = f"it knows {', '.join(map(repr, self.metrics))}" if self.metrics else "it knows none"
            raise ValueError(f"metric={name!r} is not one of task={self.name!r}; {known}. Or give a metric_fn.")
        return METRICS[name]


def _pipeline(task: str, call: str) -> str:
    return f'from transformers import pipeline\n\npipe = pipeline("{task}", model="{{where}}")\nprint(pipe({call}))'


_CHAT = (
    "from transformers import pipeline\n\n"
    'pipe = pipeline("text-generation", model="{where}")\n'
    'messages = [{"role": "user", "content": "Which ocean is the largest?"}]\n'
    'print(pipe(messages, max_new_tokens=40)[0]["generated_text"][-1]["content"])'
)

_CHAT_ABOUT_AN_IMAGE = (
    "from transformers import pipeline\n\n"
    'pipe = pipeline("image-text-to-text", model="{where}")\n'
    'content = [{"type": "image", "url": "picture.png"}, {"type": "text", "text": "What is in this picture?"}]\n'
    'written = pipe(text=[{"role": "user", "content": content}], max_new_tokens=40)\n'
    'print(written[0]["generated_text"][-1]["content"])'
)


def _generation(auto_class: str, text: str) -> str:
    return (
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("{where}")\n'
        f'model = {auto_class}.from_pretrained("{{where}}")\n'
        f'inputs = tokenizer("{text}", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"
    )


def _encoded(text: str) -> str:
    return (
        "from transformers import AutoModelForTextEncoding, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("{where}")\n'
        'model = AutoModelForTextEncoding.from_pretrained("{where}")\n'
        f'print(model(**tokenizer("{text}", return_tensors="pt")).last_hidden_state)  # of each token'
    )


_WRITES = Task(
    name="text2text-generation",
    auto_class="AutoModelForSeq2SeqLM",
    mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    objective="ForConditionalGeneration",
    inputs=(TEXT,),
    labels=("target", "summary", "highlights", "output", "label", "labels"),
    batch_of=texts_to_write,
    term="target tokens",
    predict=written_texts,
    compares="texts",
    has_classes=True,
    snippet=_generation("AutoModelForSeq2SeqLM", "A text to write another from."),
)
_HEARS = Task(
    name="automatic-speech-recognition",
    auto_class="AutoModelForSpeechSeq2Seq",
    mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    objective="ForConditionalGeneration",
    inputs=(AUDIO,),
    labels=("text", "sentence", "transcription", "transcript", "label"),
    batch_of=transcribed_speech,
    row="recordings",
    term="target tokens",
    predict=written_texts,
    compares="texts",
    has_classes=True,
    default_metric="wer",
    snippet=_pipeline("automatic-speech-recognition", '"speech.wav"'),
)

# Types of models that read text.
_OF_TEXT = (
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)
_EMBEDS = Task(
    name="feature-extraction",
    auto_class="AutoModel",
    mapping="MODEL_MAPPING_NAMES",
    among=_OF_TEXT,
    objective="Model",
    inputs=(TEXT,),
    embeds=True,
    row="texts",
    term="texts",
    predict=predicted_embeddings,
    compares="embeddings",
    default_metric="cosine",
    snippet=_pipeline("feature-extraction", '"A text to embed.", return_tensors=True') + "  # of each token",
)

# A class that several tasks know belongs to the first of them.
_ROWS = (
    Task(
        name="image-text-to-text",
        auto_class="AutoModelForImageTextToText",
        mapping="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        objective="ForConditionalGeneration",
        inputs=(IMAGE, TEXT),
        labels=("answer", "label"),
        label_is_optional=True,
        batch_of=images_with_text,
        row="images with text",
        term="predicted tokens",
        predict=predicted_next,
        snippet=_pipeline("image-text-to-text", 'text="What is in this picture?", images="picture.png"'),
        chat_snippet=_CHAT_ABOUT_AN_IMAGE,
    ),
    Task(
        name="audio-text-to-text",
        auto_class="AutoModelForMultimodalLM",
        mapping="MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        objective="ForConditionalGeneration",
        inputs=(AUDIO, TEXT),
        prepared="'input_ids', 'input_features' and 'labels', as the processor makes them",
        row="recordings with text",
        term="predicted tokens",
        predict=predicted_next,
    ),
    _HEARS,
    replace(
        _HEARS,
        auto_class="AutoModelForCTC",
        mapping="MODEL_FOR_CTC_MAPPING_NAMES",
        objective="ForCTC",
        term="recordings",
        predict=transcribed,
        has_classes=False,  # which label is where is for the loss to find
    ),
    _WRITES,
    replace(_WRITES, name="translation"),
    replace(_WRITES, name="summarization"),
    Task(
        name="text-generation",
        auto_class="AutoModelForCausalLM",
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        objective="ForCausalLM",
        inputs=(TEXT,),
        row="windows",
        term="predicted tokens",
        predict=predicted_next,
        has_classes=True,
        snippet=_generation("AutoModelForCausalLM", "The largest ocean is"),
        chat_snippet=_CHAT,
    ),
    Task(
        name="text-classification",
        auto_class="AutoModelForSequenceClassification",
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        objective="ForSequenceClassification",
        one_label=True,
        inputs=(TEXT,),
        labels=("label", "labels"),
        batch_of=classified_texts,
        predict=predicted_labels,
        has_classes=True,
        default_metric="accuracy",
        snippet=_pipeline("text-classification", '"A sentence to classify."')
        + '  # of a pair: {"text": "A question?", "text_pair": "An answer."}',
    ),
    Task(
        name="token-classification",
        auto_class="AutoModelForTokenClassification",
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        objective="ForTokenClassification",
        inputs=(WORDS,),
        labels=("labels", "ner_tags", "pos_tags", "tags", "label"),
        batch_of=classified_words,
        term="words",
        predict=predicted_labels,
        has_classes=True,
        default_metric="accuracy",
        snippet=_pipeline("token-classification", '"My name is Ada and I live in London."'),
    ),
    Task(
        name="image-classification",
        auto_class="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        objective="ForImageClassification",
        one_label=True,
        inputs=(IMAGE,),
        labels=("label", "labels"),
        batch_of=classified_images,
        row="images",
        term="images",
        predict=predicted_labels,
        has_classes=True,
        default_metric="accuracy",
        snippet=_pipeline("image-classification", '"picture.png"'),
    ),
    Task(
        name="fill-mask",
        auto_class="AutoModelForMaskedLM",
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        objective="ForMaskedLM",
        inputs=(TEXT,),
        prepare=masked_tokens,
        row="windows",
        term="masked tokens",
        predict=predicted_labels,
        has_classes=True,
        snippet=_pipeline("fill-mask", 'f"The largest ocean is the {pipe.tokenizer.mask_token}."'),
    ),
    Task(
        name="audio-classification",
        auto_class="AutoModelForAudioClassification",
        mapping="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        objective="ForSequenceClassification",
        one_label=True,
        inputs=(AUDIO,),
        labels=("label", "labels", "intent_class", "genre", "emotion"),
        batch_of=classified_recordings,
        row="recordings",
        term="recordings",
        predict=predicted_labels,
        has_classes=True,
        default_metric="accuracy",
        snippet=_pipeline("audio-classification", '"sound.wav"'),
    ),
    # What has no function yet is given as batches; a card still knows what such a model is for.
    Task(
        name="question-answering",
        auto_class="AutoModelForQuestionAnswering",
        mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        objective="ForQuestionAnswering",
        prepared="'input_ids', 'start_positions' and 'end_positions'",
    ),
    Task(
        name="visual-question-answering",
        auto_class="AutoModelForVisualQuestionAnswering",
        mapping="MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES",
        objective="ForQuestionAnswering",
        prepared="'pixel_values', 'input_ids' and 'labels', as the processor makes them",
    ),
    Task(
        name="multiple-choice",
        auto_class="AutoModelForMultipleChoice",
        mapping="MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
        objective="ForMultipleChoice",
        one_label=True,
        prepared="'input_ids' of every choice and a 'label'",
        predict=predicted_labels,
        default_metric="accuracy",
    ),
    Task(
        name="image-segmentation",
        auto_class="AutoModelForSemanticSegmentation",
        mapping="MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
        objective="ForSemanticSegmentation",
        prepared="'pixel_values', as the image processor makes them, and 'labels', a class for each pixel",
        row="images",
        term="pixels",
    ),
    _EMBEDS,
    # The encoder of an encoder-decoder, as a class of its own.
    replace(
        _EMBEDS,
        auto_class="AutoModelForTextEncoding",
        mapping="MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
        among=("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
        snippet=_encoded("A text to embed."),
    ),
    replace(
        _EMBEDS,
        name="image-feature-extraction",
        mapping="MODEL_FOR_IMAGE_MAPPING_NAMES",
        among=(),
        objective="VisionModel",
        inputs=(IMAGE,),
        batch_of=images_alone,
        row="images",
        term="images",
        snippet=_pipeline("image-feature-extraction", '"picture.png", return_tensors=True') + "  # of each patch",
    ),
    replace(
        _EMBEDS,
        name="zero-shot-image-classification",
        auto_class="AutoModelForZeroShotImageClassification",
        mapping="MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        among=(),
        objective="ForZeroShotImageClassification",
        inputs=(IMAGE, TEXT),
        batch_of=images_with_captions,
        row="images with text",
        term="images",
        snippet=_pipeline("zero-shot-image-classification", '"picture.png", candidate_labels=["a cat", "a dog"]'),
    ),
)
# What the names begin with of what a batch has of images and recordings.
OF_MEDIA = ("pixel", "image", "video", "input_features", "input_values", "audio")
# Task -> its rows: two where models of two kinds are for it.
TASKS: dict[str, tuple[Task, ...]] = {row.name: tuple(one for one in _ROWS if one.name == row.name) for row in _ROWS}


def auto_classes(name: str | None) -> list[Any]:
    """The Auto classes of a task, of which one loads a model for it; none without a name."""
    return [row.auto for row in TASKS[name]] if name else []


def task_of_class(class_name: str, is_encoder_decoder: bool = False) -> Task | None:
    """What models of a class are for; None: not known.

    >>> task_of_class("BertForSequenceClassification").name, task_of_class("GPT2LMHeadModel").name
    ('text-classification', 'text-generation')
    """
    name = class_name.removeprefix("FSDP")  # FSDP2 prefixes the name of the class that it shards
    known = next((row for row in _ROWS if name in row.classes), None)
    if known is not None:
        return None if known is _EMBEDS and is_encoder_decoder else known
    # A class that transformers does not have is named as its own are. One without a head may be for anything.
    alike = [row for row in _ROWS if name.endswith(row.objective) and not row.embeds]
    if is_encoder_decoder and _WRITES in alike:
        return _WRITES
    return next((row for row in alike if row.objective != _WRITES.objective), None)


def row_for(task: str, class_name: str) -> Task:
    """The row of a task that a class is for; the first, of a class that transformers does not have."""
    return next((row for row in TASKS[task] if class_name in row.classes), TASKS[task][0])


def counted_as(task: Task | None, batches: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """What rows of these batches, and the terms of their loss, are called."""
    if task is None:
        return "rows", "terms"
    if is_text_alone(task, batches):
        task = TASKS["text-generation"][0]  # it is cut into windows
    return task.row, task.term


def is_text_alone(task: Task, batches: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a model that also sees or hears is given no image or recording with any text."""
    return task.medium is not None and not any(name.startswith(OF_MEDIA) for batch in batches for name in batch)


def task_for(name: str | None, class_name: str, is_encoder_decoder: bool = False) -> Task | None:
    """The task that is named, if models of this class are for it; without a name the class's own.

    Raises:
        ValueError: the class is for something else.
    """
    own = task_of_class(class_name, is_encoder_decoder)
    if name is None:
        return own
    plain = class_name.removeprefix("FSDP")
    fits = [row for row in TASKS[name] if plain in row.classes or (not _embeds(own) and _is_named_for(row, plain))]
    if not fits:
        raise ValueError(
            f"task={name!r} is for models of {' or '.join(row.auto_class for row in TASKS[name])}, and this is a "
            f"{plain}" + (f" ({own.name})." if own else ".") + " Leave task unset, or load another class."
        )
    return fits[0]


def _embeds(task: Task | None) -> bool:
    return task is not None and task.embeds


def _is_named_for(row: Task, class_name: str) -> bool:
    """GPT2LMHeadModel has a head, whatever it ends with; and what a class of the user's own reads no name says."""
    import transformers

    ending = "Model" if row.embeds and not hasattr(transformers, class_name) else row.objective
    return class_name.endswith(ending) and not (row.embeds and "Head" in class_name)
