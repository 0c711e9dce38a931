"""Writes a task for lm-eval whose perplexity `umbra evaluate` can compute as well: documents of the demo's held-out
text that are one window each, and one text of them all (docs/serving.md has the commands).

    .venv/bin/python -m tests.serving.lm_eval FOLDER
"""

import json
import sys
from pathlib import Path

from text.tokenizer import Tokenizer
from umbra.files import ROOT

WINDOW = 1900  # tokens, of which the first is the end of a text: lm-eval puts it before each document
DOCUMENTS = 4
TASK = """task: austen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: byte_perplexity}}]
metadata: {{version: 1.0}}
"""


def main(folder: Path) -> None:
    model = ROOT / "checkpoints" / "austen_moe"
    tokenizer = Tokenizer(model)
    ids = tokenizer.encode((model / "held_out.txt").read_text(encoding="utf-8"), chat=False)
    documents: list[str] = []
    start = 0
    while len(documents) < DOCUMENTS:
        part = ids[start : start + WINDOW - 1]
        text = tokenizer.decode(part)
        same = tokenizer.encode(text, chat=False) == part  # by itself, it may be other tokens
        documents += [text] * same
        start += len(part) if same else 1
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    (folder / "austen.yaml").write_text(TASK.format(documents=file.resolve()), encoding="utf-8")
    end = tokenizer.hf.eos_token
    (folder / "text.txt").write_text("".join(end + text for text in documents), encoding="utf-8")
    print(f"{folder}: {DOCUMENTS} documents, {sum(len(text.encode()) for text in documents)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
