"""What a request gets back is the target's own: stops, logprobs, filters, each for its own request.

Pitfalls 10, 11 and 14, under speculation that accepts several tokens at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from tests.engine.generation import (
    GREEDY,
    TinyShelf,
    generate,
    load,
    random_prompts,
    target_only,
    tokens,
)
from tests.reference_speculation import reference_logits
from tests.tiny_models import TinyTarget
from tests.tiny_tokenizer import IM_END

PROMPTS = random_prompts(4, seed=31)
QWEN = TinyTarget("qwen3")


@pytest.fixture
def pair(tiny: TinyShelf) -> tuple[Path, Path]:
    """A target and a drafter that often has many tokens accepted at once."""
    return tiny.target(QWEN), tiny.drafter("domino-shifted", QWEN)


def positions_in_blocks(output: RequestOutput) -> dict[str, int]:
    """Output indices at the start, in the middle and at the end of an accepted block."""
    found: dict[str, int] = {}
    start = 1
    for length in output.metrics.accept_lengths:
        if length >= 4 and not found:
            found = {"first": start, "middle": start + 1, "bonus": start + length - 1}
        start += length
    return found


@pytest.fixture
def accepted(pair: tuple[Path, Path]) -> tuple[RequestOutput, dict[str, int]]:
    """A request with a long acceptance whose tokens are ASCII and did not come before."""
    with load(*pair, verify_width=16) as llm:
        for output in llm.generate(random_prompts(24, seed=31), GREEDY):
            places, ids = positions_in_blocks(output), output.token_ids
            words = [llm.tokenizer.decode([ids[i]]) for i in places.values()]
            fresh = all(ids.index(ids[i]) == i for i in places.values())
            if places and fresh and all(word.isascii() and word for word in words):
                return output, places
    pytest.fail("no prompt has such an acceptance")


@pytest.mark.parametrize("place", ["first", "middle", "bonus"])
@pytest.mark.parametrize("kind", ["token", "token at the cap", "cap"])
def test_an_end_inside_a_block_drops_what_follows(
    pair: tuple[Path, Path],
    accepted: tuple[RequestOutput, dict[str, int]],
    place: str,
    kind: str,
) -> None:
    whole, places = accepted
    end = places[place] + 1
    token = whole.token_ids[end - 1]
    params = {
        "token": replace(GREEDY, stop_token_ids=[token]),
        "token at the cap": replace(GREEDY, stop_token_ids=[token], max_tokens=end),
        "cap": replace(GREEDY, max_tokens=end),
    }[kind]
    outputs = generate(*pair, [whole.prompt_token_ids], params, verify_width=16)
    alone = generate(pair[0], None, [whole.prompt_token_ids], params)
    for output in (*outputs, *alone):
        assert output.token_ids == whole.token_ids[:end]
        assert output.finish_reason == ("length" if kind == "cap" else "stop")
        assert output.stop_reason == (None if kind == "cap" else token)
        assert output.text == alone[0].text
        assert 1 + sum(output.metrics.accept_lengths) == end


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", ["first", "middle", "bonus"])
def test_a_stop_string_inside_a_block_ends_text_and_tokens(
    pair: tuple[Path, Path],
    accepted: tuple[RequestOutput, dict[str, int]],
    place: str,
    include: bool,
) -> None:
    whole, places = accepted
    with load(*pair, verify_width=16) as llm:
        before = llm.tokenizer.decode(whole.token_ids[: places[place]])
        upto = llm.tokenizer.decode(whole.token_ids[: places[place] + 1])
        stop = upto[len(before) :]
        params = replace(GREEDY, stop=[stop], include_stop_str_in_output=include)
        streamed = list(llm.stream(whole.prompt_token_ids, params))
    alone = generate(pair[0], None, [whole.prompt_token_ids], params)[0]
    output = streamed[-1].finished
    assert output is not None
    assert output.finish_reason == alone.finish_reason == "stop"
    assert output.stop_reason == alone.stop_reason == stop
    assert output.token_ids == alone.token_ids
    assert output.text == alone.text
    assert output.text.endswith(stop) == include
    assert len(output.text) <= len(upto)
    assert "".join(piece.text for piece in streamed) == output.text
    assert [t for piece in streamed for t in piece.token_ids] == output.token_ids
    assert 1 + sum(output.metrics.accept_lengths) == len(output.token_ids)


def test_the_models_own_end_token_ends_unless_ignored(tiny: TinyShelf) -> None:
    model, draft = tiny.target(), tiny.drafter("domino-shifted")
    prompts = random_prompts(24, seed=8)
    params = replace(GREEDY, max_tokens=60)
    ignoring = generate(model, draft, prompts, params, verify_width=16)
    heeding = generate(model, draft, prompts, replace(params, ignore_eos=False), verify_width=16)
    stopped = 0
    for whole, output in zip(ignoring, heeding, strict=True):
        if IM_END in whole.token_ids:
            stopped += 1
            assert output.token_ids == whole.token_ids[: whole.token_ids.index(IM_END) + 1]
            assert output.finish_reason == "stop" and output.stop_reason is None
            assert "<|im_end|>" not in output.text
        else:
            assert output.token_ids == whole.token_ids
            assert output.finish_reason == "length"
    assert stopped, "no prompt leads to the end token"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_verified_tokens_are_the_targets(
    pair: tuple[Path, Path], temperature: float
) -> None:
    params = [
        replace(GREEDY, temperature=temperature, seed=i, logprobs=n)
        for i, n in enumerate([3, None, 0, 5])
    ]
    outputs = generate(*pair, PROMPTS, params, verify_width=8)
    alone = generate(pair[0], None, PROMPTS, params)
    assert tokens(outputs) == tokens(alone)
    assert outputs[1].logprobs is None
    for i in (0, 2, 3):
        output, n = outputs[i], params[i].logprobs
        prompt = output.prompt_token_ids
        logits = reference_logits(pair[0], prompt + output.token_ids)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        for row, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
            assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())
            assert len(entry.top) == n
            best = expected[row].topk(n or 0)
            assert list(entry.top) == best.indices.tolist()
            assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


FILTERS = {
    "min-p": {"min_p": 0.3},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.4},
    "temperature": {"temperature": 0.2},
    "bad words": {"bad_words": ["e", "th", "he", "a"]},
    "repetition penalty": {"repetition_penalty": 3.0},
    "presence penalty": {"presence_penalty": 2.0},
    "frequency penalty": {"frequency_penalty": 2.0},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_on_the_second_request_changes_the_second_only(
    pair: tuple[Path, Path], name: str
) -> None:
    plain = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=80, ignore_eos=True) for i in range(4)
    ]
    filtered = [*plain[:1], replace(plain[1], **FILTERS[name]), *plain[2:]]
    without = generate(*pair, PROMPTS, plain, verify_width=8)
    outputs = generate(*pair, PROMPTS, filtered, verify_width=8)
    alone = generate(pair[0], None, [PROMPTS[1]], [filtered[1]])
    for i in (0, 2, 3):
        assert outputs[i].token_ids == without[i].token_ids
    assert outputs[1].token_ids == alone[0].token_ids
    if name != "bad words":  # a banned token need not have been on the way
        assert outputs[1].token_ids != without[1].token_ids


def test_bad_words_are_banned_at_every_row_of_a_block(pair: tuple[Path, Path]) -> None:
    """Ban, one after another, tokens that the greedy answer is made of."""
    free = target_only(pair[0], PROMPTS)
    with load(*pair, verify_width=16) as llm:
        words = [llm.tokenizer.decode([t]) for t in free[0].token_ids]
    banned = list(dict.fromkeys(w for w in words if w.isascii() and w.strip()))[:8]
    params = [replace(GREEDY, bad_words=banned), GREEDY, GREEDY, GREEDY]
    outputs = generate(*pair, PROMPTS, params, verify_width=16)
    alone = generate(pair[0], None, PROMPTS, params)
    assert tokens(outputs) == tokens(alone)
    assert tokens(outputs)[1:] == tokens(free)[1:]
    assert outputs[0].token_ids != free[0].token_ids


def test_chat_messages_go_through_the_template(pair: tuple[Path, Path]) -> None:
    message = {"role": "user", "content": "tell me"}
    with load(*pair, verify_width=8) as llm:
        (output,) = llm.generate([message], GREEDY)
        text = llm.tokenizer.decode(output.prompt_token_ids)
        (same,) = llm.generate(output.prompt_token_ids, GREEDY)
    assert text == "<|im_start|>user\ntell me<|im_end|>\n<|im_start|>assistant\n"
    assert same.token_ids == output.token_ids
