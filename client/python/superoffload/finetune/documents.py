"""What a model learns from: documents of tokens, made of a text file, of JSON lines or of a Hugging Face dataset."""

import dataclasses
import datetime
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# As Stanford Alpaca has it, and most that train base models on such data.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
_AT_ONCE = 1000  # texts, which the tokenizer divides among its threads
_DAY = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")  # in chat templates
_SHAPES = "messages, prompt and completion, instruction and output, or text"


@dataclasses.dataclass
class Document:
    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]  # whether a token is to be predicted


@dataclasses.dataclass
class _Text:
    text: str
    spans: list[tuple[int, int]]  # that the model is to write: characters
    whole: bool  # has all special tokens


def of_file(path: pathlib.Path, tokenizer: Any) -> Document:
    """A text, all of which is learned."""
    return learned_whole(tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"])


def learned_whole(tokens: Sequence[int]) -> Document:
    return Document(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))


def of_records(
    records: Iterable[Mapping[str, Any]], tokenizer: Any, learn: str, today: datetime.date
) -> Iterator[Document]:
    """Raises ValueError for a record that has none of the known shapes. ``today``: what chat templates take it for."""
    for whole, texts in itertools.groupby(_texts_of(records, tokenizer, today), lambda text: text.whole):
        while some := list(itertools.islice(texts, _AT_ONCE)):
            yield from _tokens_of(some, whole, tokenizer, learn)


def _texts_of(records: Iterable[Mapping[str, Any]], tokenizer: Any, today: datetime.date) -> Iterator[_Text]:
    for number, record in enumerate(records):
        try:
            yield _text_of(record, tokenizer, today)
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from None


def read_records(data: str, split: str) -> Iterable[Mapping[str, Any]]:
    """Of a .jsonl file, or of a dataset; raises ValueError with a sentence."""
    path = pathlib.Path(data)
    if path.suffix == ".jsonl":
        return _lines(path)
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(
            f"{data} is no file; datasets reads what has such a name on the Hugging Face Hub, or is a directory, and "
            "is not installed: pip install 'superoffload[finetune]'"
        ) from None
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(data)
            return saved if isinstance(saved, datasets.Dataset) else saved[split]
        return datasets.load_dataset(data, split=split)
    except Exception as error:  # of the network, of files, of names: whatever datasets raises
        raise ValueError(f"cannot read {split} of {data}: {' '.join(str(error).split())}") from error


def _lines(path: pathlib.Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f'line {number} of {path} is no JSON object, as in {{"text": "..."}}')
            yield record


def _text_of(record: Mapping[str, Any], tokenizer: Any, today: datetime.date) -> _Text:
    if record.get("messages"):
        return _chat(record["messages"], tokenizer, today)
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return _completed(record["prompt"], record["completion"], tokenizer)
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        shape = _ALPACA_WITH_INPUT if record.get("input") else _ALPACA
        fields = {"instruction": record["instruction"], "input": record.get("input") or ""}
        return _completed(shape.format(**fields), record["output"], tokenizer)
    if isinstance(record.get("text"), str):
        return _completed("", record["text"], tokenizer)
    raise ValueError(f"has {', '.join(record) or 'nothing'} but must have {_SHAPES}")


def _completed(prompt: str, completion: str, tokenizer: Any) -> _Text:
    text = prompt + completion + (tokenizer.eos_token or "")
    return _Text(text, [(len(prompt), len(text))], whole=False)


def _chat(messages: list[dict[str, Any]], tokenizer: Any, today: datetime.date) -> _Text:
    """As the model's template renders it."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "has messages, but the model's tokenizer has no chat template; train an instruct model, or give prompt and "
            "completion"
        )

    # The clock's day would be another one when a run goes on.
    template = _DAY.sub(lambda call: json.dumps(today.strftime(call[2])), tokenizer.get_chat_template())

    def rendered(count: int, **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages[:count], tokenize=False, chat_template=template, **options)
        return text

    text = rendered(len(messages))
    spans = []
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, until = rendered(i, add_generation_prompt=True) if i else "", rendered(i + 1)
        end = len(until)
        if not text.startswith(until):  # an earlier turn may be without its reasoning
            content = str(message.get("content") or "").strip()
            found = text.find(content, len(before))
            end = found + len(content) if found >= 0 else 0
        if not text.startswith(before) or end < len(before):
            raise ValueError(
                f"message {i} is rendered otherwise within its conversation, so that its tokens cannot be told apart; "
                "set learn: all"
            )
        spans.append((len(before), end))
    return _Text(text, spans, whole=True)


def _tokens_of(texts: Sequence[_Text], whole: bool, tokenizer: Any, learn: str) -> Iterator[Document]:
    encoded = tokenizer(
        [text.text for text in texts],
        add_special_tokens=not whole,
        return_offsets_mapping=learn != "all",
        verbose=False,
    )
    for i, (text, tokens) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
        document = learned_whole(tokens)
        if learn != "all":
            offsets = encoded["offset_mapping"][i]
            begins = np.fromiter((begin for begin, _ in offsets), np.int32, len(offsets))
            document.learned[:] = False
            for first, to in text.spans:
                document.learned |= (begins >= first) & (begins < to)
        yield document
