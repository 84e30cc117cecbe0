"""Which tokens of records are learned."""

import datetime
import json

import numpy as np
import pytest
from tests.support import tiny_checkpoint

from superoffload.finetune import documents

TODAY = datetime.date(2026, 2, 3)
CHAT = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Really?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_checkpoint.tokenizer()


def learned(record, tokenizer, learn="completions"):
    (document,) = documents.of_records([record], tokenizer, learn, TODAY)
    return tokenizer.decode(document.tokens), tokenizer.decode(document.tokens[document.learned])


def test_of_a_conversation_what_the_assistant_says(tokenizer):
    whole, answers = learned({"messages": CHAT}, tokenizer)
    assert whole == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert answers == "Because.<|im_end|>\nYes.<|im_end|>\n"
    assert learned({"messages": CHAT}, tokenizer, "all") == (whole, whole)


def test_a_template_that_drops_the_reasoning_of_earlier_turns(tokenizer):
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert learned({"messages": CHAT}, tokenizer)[1] == "Because.<think></think>Yes.<|im_end|>"


def test_a_template_that_asks_for_the_day_gets_the_one_on_which_the_run_began():
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert learned({"messages": CHAT}, tokenizer, "all")[0].startswith("2026-02-03Why?")


def test_a_template_that_renders_turns_by_what_follows_is_refused(tokenizer):
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="record 0: message 1 is rendered otherwise .* set learn: all"):
        learned({"messages": CHAT}, tokenizer)


def test_of_prompts_and_instructions_the_completion_and_its_end(tokenizer):
    assert learned({"prompt": "1 + 1 = ", "completion": "2"}, tokenizer) == ("1 + 1 = 2<|im_end|>", "2<|im_end|>")
    whole, answer = learned({"instruction": "Add.", "input": "1, 1", "output": "2"}, tokenizer)
    assert answer == "2<|im_end|>"
    assert whole.endswith("### Instruction:\nAdd.\n\n### Input:\n1, 1\n\n### Response:\n2<|im_end|>")
    assert learned({"text": "abc"}, tokenizer) == ("abc<|im_end|>", "abc<|im_end|>")


def test_of_many_each_is_as_it_is_alone_and_in_its_place(tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "_AT_ONCE", 3)
    shapes = [{"text": "a"}, {"prompt": "b", "completion": "c"}, {"messages": CHAT}]
    records = [{**shapes[i % 5 % 3], **({} if i % 5 == 2 else {"text": "d" * i})} for i in range(23)]
    together = list(documents.of_records(records, tokenizer, "completions", TODAY))
    for record, document in zip(records, together, strict=True):
        (alone,) = documents.of_records([record], tokenizer, "completions", TODAY)
        assert np.array_equal(document.tokens, alone.tokens) and np.array_equal(document.learned, alone.learned)


def test_what_has_no_known_shape_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="record 1: has question but must have messages, prompt and completion"):
        list(documents.of_records([{"text": "a"}, {"question": "b"}], tokenizer, "all", TODAY))
    tokenizer = tiny_checkpoint.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has messages, but the model's tokenizer has no chat template"):
        learned({"messages": CHAT}, tokenizer)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n\n[1]\n")
    with pytest.raises(ValueError, match="line 3 of .* is no JSON object"):
        list(documents.read_records(str(path), "train"))
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1 of .* is not JSON"):
        list(documents.read_records(str(path), "train"))
