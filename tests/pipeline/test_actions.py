"""Actions print and parse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op, format_actions, parse_actions

actions = st.builds(Action, st.sampled_from(Op), st.integers(0, 10**9), st.none() | st.integers(0, 10**6))


@given(actions)
def test_an_action_parses_as_what_printed_it(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(actions))
def test_a_line_of_actions_parses_as_what_printed_it(line: list[Action]) -> None:
    assert parse_actions(format_actions(line)) == line


@given(st.text(max_size=6) | st.from_regex(r"[<>]?[A-Z][0-9]{1,2}([.][0-9])?"))
def test_any_other_text_is_refused_and_never_half_read(text: str) -> None:
    try:
        action = Action.parse(text)
    except ConfigError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert Action.parse(str(action)) == action
        assert action.op.value == text.rstrip(".0123456789")


def test_texts_are_those_of_the_papers() -> None:
    line = [Action(Op.RECEIVE_ACTIVATION, 5), Action(Op.FORWARD, 5, 2), Action(Op.SEND_GRADIENT, 3, 0)]
    assert format_actions(line) == "<F5 F5.2 >B3.0"
    assert parse_actions("  R12\n>F0  ") == [Action(Op.RECOMPUTE, 12), Action(Op.SEND_ACTIVATION, 0)]
    assert parse_actions("") == []


@pytest.mark.parametrize("text", ["F", "5", "F-1", "F5.", "F5.x", "X5", "<U5", "f5", "F5 ", "F5.1.2", "F٣", "<<F1"])
def test_what_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no action: write F R B U P T"):
        Action.parse(text)


def test_the_first_wrong_word_of_a_line_is_named() -> None:
    with pytest.raises(ConfigError, match="'oops' is no action"):
        parse_actions("F1 oops B1 worse")


def test_an_op_is_a_send_or_a_receive_by_its_arrow() -> None:
    for op in Op:
        assert (op.is_receive, op.is_send) == (op.value.startswith("<"), op.value.startswith(">"))
