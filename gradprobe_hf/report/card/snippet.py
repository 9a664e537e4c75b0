"""How a card says the model is loaded: the code of its task, or the class alone."""

from __future__ import annotations

from gradprobe_hf.report.report import Report
from gradprobe_hf.tasks.table import TASKS


def loading_snippet(report: Report, where: str) -> str:
    task = report.model["task"]
    snippet = ""
    if task:
        is_chat = report.model.get("has_chat_template", False)  # not in reports of before
        row = TASKS[task][0]
        snippet = (is_chat and row.chat_snippet) or row.snippet
    if snippet and report.model["processing_class"] != "NoneType":
        return snippet.replace("{where}", where)
    name = report.model["class"]
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{where}")'
