"""Structured output: texts that are drawn under masks are in their language, and end where it may end."""

import json
import random
import re
import sys
import threading

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference import RequestRefused, Structure
from colossalai.inference.sampling._structured import StructureCompiler
from tests.inference.tiny_tokenizers import byte_fallback, byte_level

pytestmark = pytest.mark.unit

KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
COMPILERS = {
    kind: StructureCompiler(make(), end_token_ids=[make().eos_token_id], num_kept=8)
    for kind, make in KINDS.items()
}
CLOSING = ('"', "}", "]", "0", "1", "true")


def allowed(matcher):
    """Return the ids of the tokens that may come next."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(kind, matcher, seed, *, most=400):
    """Draw a text at random under the masks; soon tokens that bring it to an end. None if it has none yet."""
    tokenizer, choose = KINDS[kind](), random.Random(seed)
    end, token_ids = tokenizer.eos_token_id, []
    closing = {tokenizer.encode(text, add_special_tokens=False)[-1] for text in CLOSING}
    while len(token_ids) < most:
        tokens = allowed(matcher)
        likely = closing.intersection(tokens) if len(token_ids) > choose.randrange(40) else ()
        token = choose.choice(sorted(likely) or tokens)
        if end in tokens and choose.random() < 0.5:
            token = end
        assert matcher.accept(token)
        if token == end:
            assert matcher.is_finished
            return tokenizer.decode(token_ids)
        token_ids.append(token)
    return None


@st.composite
def schemas(draw, depth=2):
    """Return a JSON schema of what llguidance knows."""
    low = draw(st.integers(-20, 20))
    high = low + draw(st.integers(0, 30))
    size = draw(st.integers(0, 3))
    simple = [
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "number", "exclusiveMinimum": low, "maximum": high + 1},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "minLength": size, "maxLength": size + 4},
        {"type": "string", "pattern": "^[a-c]+x?$"},
        {"type": "string", "format": "date"},
        {"enum": ["ja", 1, None, 2.5, {"a": [1]}]},
        {"const": "ß語"},
        {"type": ["integer", "null"]},
    ]
    if not depth:
        return draw(st.sampled_from(simple))
    part = schemas(depth=depth - 1)
    kind = draw(st.sampled_from(["simple", "array", "object", "anyOf"]))
    if kind == "array":
        return {"type": "array", "items": draw(part), "minItems": size, "maxItems": size + 2}
    if kind == "object":
        names = draw(st.lists(st.sampled_from(["a", "b c", "ö", 'q"']), unique=True, max_size=3))
        return {
            "type": "object",
            "properties": {name: draw(part) for name in names},
            "required": names[:size],
            "additionalProperties": draw(st.booleans()),
        }
    if kind == "anyOf":
        return {"anyOf": [draw(part), draw(part)]}
    return draw(st.sampled_from(simple))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_a_text_under_a_schema_parses_and_validates(kind, schema, seed):
    check_schema(kind, schema, seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_a_text_under_any_of_many_schemas_parses_and_validates(kind, schema, seed):
    check_schema(kind, schema, seed)


def check_schema(kind, schema, seed):
    matcher = COMPILERS[kind].compile(Structure(kind="json", source=json.dumps(schema)))
    text = walk(kind, matcher, seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def test_most_walks_come_to_an_end():
    """Else the test above would look at nothing."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}}},
        "required": ["a"],
    }
    structure = Structure(kind="json", source=json.dumps(schema))
    texts = [walk("byte_level", COMPILERS["byte_level"].compile(structure), seed) for seed in range(30)]
    assert sum(text is not None for text in texts) > 20
    assert len(set(texts)) > 20


EXPRESSIONS = [
    "[0-9]{3}-[a-f]+",
    "(ja|nein)( [a-z]{2,4}){0,3}",
    "",
    "a?",
    r"[0-9]+(\.[0-9]{1,2})?",
    "[^x]{1,5}",
    "(?i)groot",
    "語+.?",
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(expression=st.sampled_from(EXPRESSIONS), seed=st.integers(0, 2**32))
def test_a_text_under_an_expression_matches(kind, expression, seed):
    text = walk(kind, COMPILERS[kind].compile(Structure(kind="regex", source=expression)), seed)
    if text is not None:
        assert re.fullmatch(expression, text, re.DOTALL)


@settings(max_examples=60)
@given(
    source=st.sampled_from(
        ['{"type": "array", "items": {"type": "integer"}}', '{"enum": ["a", "ab", 1]}', "{}"]
    ),
    seed=st.integers(0, 2**32),
)
def test_tokens_that_are_taken_back_leave_no_trace(source, seed):
    compiler, choose = COMPILERS["byte_level"], random.Random(seed)
    structure = Structure(kind="json", source=source)
    matcher, taken = compiler.compile(structure), []
    for _ in range(30):
        if taken and choose.random() < 0.3:
            count = choose.randint(1, len(taken))
            matcher.rollback(count)
            del taken[-count:]
        tokens = allowed(matcher)
        wrong = choose.choice(sorted(set(range(320)) - set(tokens)))
        assert not matcher.accept(wrong)
        assert allowed(matcher) == tokens
        end = byte_level().eos_token_id
        taken.append(end if end in tokens and choose.random() < 0.3 else choose.choice(tokens))
        assert matcher.accept(taken[-1])
        again = compiler.compile(structure)
        assert all(again.accept(token) for token in taken)
        assert again.is_finished == matcher.is_finished
        if taken[-1] == end:
            assert matcher.is_finished
            matcher.rollback(1)
            taken.pop()
        else:
            assert allowed(again) == allowed(matcher)


def test_end_tokens_are_allowed_where_the_language_may_end():
    tokenizer = byte_level()
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    digit = tokenizer.convert_tokens_to_ids("7")
    matcher = StructureCompiler(tokenizer, end_token_ids=[begin, end]).compile(
        Structure(kind="regex", source="7{1,2}")
    )
    assert allowed(matcher) == [digit]
    assert not matcher.accept(end)
    assert matcher.accept(digit)
    assert allowed(matcher) == sorted([begin, end, digit])
    assert not matcher.is_finished
    assert matcher.accept(digit)
    assert allowed(matcher) == sorted([begin, end])
    assert matcher.is_finished
    assert matcher.accept(begin)
    assert not matcher.accept(digit)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json", "{", "EOF while parsing"),
        ("json", "[1]", "Expecting object schema"),
        ("json", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json", '{"not": {"type": "string"}}', "Unimplemented keys"),
        ("json", '{"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        ("json", '{"enum": []}', "Unsatisfiable"),
        ("json", '{"$ref": "http://127.0.0.1/schema"}', "does not fetch"),
        ("json", '{"type": "string", "format": "nonsense"}', "Unknown format"),
        ("regex", "(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?=a)b", "look-around"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(kind, source, reason):
    with pytest.raises(RequestRefused, match="cannot be followed") as caught:
        COMPILERS["byte_level"].compile(Structure(kind=kind, source=source))
    assert reason in str(caught.value)
    assert source[:20] in str(caught.value).replace("\\\\", "\\")


def test_a_missing_library_and_another_tokenizer_are_refused_in_words(monkeypatch):
    structure = Structure(kind="regex", source="a")
    with pytest.raises(RequestRefused, match="fast tokenizers"):
        StructureCompiler([], end_token_ids=[0]).compile(structure)
    with pytest.raises(RequestRefused, match="a token that ends an answer"):
        StructureCompiler(byte_level(), end_token_ids=[]).compile(structure)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install colossalai\[structured\]"):
        StructureCompiler(byte_level(), end_token_ids=[1]).compile(structure)


def test_grammars_are_kept_the_last_ones_and_matchers_share_nothing(monkeypatch):
    compiler = StructureCompiler(byte_level(), end_token_ids=[1], num_kept=2)
    compiled, made = compiler._compile_grammar, []
    monkeypatch.setattr(compiler, "_compile_grammar", lambda one: made.append(one.source) or compiled(one))
    for source in "abacab":
        compiler.compile(Structure(kind="regex", source=source))
    assert made == ["a", "b", "c", "b"]
    first, second = (compiler.compile(Structure(kind="regex", source="ab")) for _ in range(2))
    before = allowed(second)
    assert first.accept(before[0])
    assert allowed(second) == before


def test_any_thread_may_ask():
    compiler, texts = StructureCompiler(byte_level(), end_token_ids=[1], num_kept=2), []

    def work(number):
        for _ in range(20):
            matcher = compiler.compile(Structure(kind="regex", source=f"[0-9]{{{number % 4}}}x"))
            texts.append((number % 4, walk("byte_level", matcher, number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 160
    assert all(len(text) == size + 1 and text[-1] == "x" for size, text in texts)
