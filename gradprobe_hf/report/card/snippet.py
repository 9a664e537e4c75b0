"""How a card says the model is loaded: the code of its task, or the class alone."""

from __future__ import annotations

import json

import transformers

from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.table import row_for


def loading_snippet(report: Report, where: str, revision: str | None = None) -> str:
    """Python that loads the model, and uses it.

    Args:
        where: a repository, or a folder.
        revision: a branch of the repository, if it is not the main one.
    """
    task, own_code = report.model["task"], report.model.get("own_code", [])
    snippet = ""
    if task:
        is_chat = report.model.get("has_chat_template", False)  # not in reports of before
        row = row_for(task, report.model["class"])
        snippet = (is_chat and row.chat_snippet) or row.snippet
    if snippet and report.model["processing_class"] != "NoneType":
        return _with_options(snippet, where, revision, own_code)
    # transformers does not have a class of the model's own under its name, nor one of the user's.
    name = next((one for one in own_code if one.startswith("AutoModel")), report.model["class"])
    if task and not own_code and not hasattr(transformers, name):
        name = row_for(task, report.model["class"]).auto_class
    found = f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{{where}}")'
    return _with_options(found, where, revision, own_code)


def _with_options(snippet: str, where: str, revision: str | None, own_code: list[str]) -> str:
    """The snippet with its place, the branch there, and leave for a model's own code to run where it has any."""
    options = [json.dumps(where, ensure_ascii=False)]
    options += [f'revision="{revision}"'] if revision else []
    options += ["trust_remote_code=True"] if own_code else []
    return snippet.replace('"{where}"', ", ".join(options))
