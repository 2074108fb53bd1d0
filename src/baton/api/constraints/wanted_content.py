"""Rules for content that a client constrains: JSON, a regular expression, a choice of texts, a grammar, tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.api.constraints.client_grammars import lark_rule
from baton.api.constraints.lark_text import LarkText, quoted
from baton.api.constraints.patterns import PatternRefused, whole_text_pattern
from baton.api.constraints.schema_gate import checked_schema, parsed_json
from baton.api.constraints.wanted import ConstraintKind, ConstraintRefused, WantedConstraint

CHOICES_MAX = 10_000
CHOICE_CHARS_MAX = 256 << 10
TAGS_MAX = 128


def content_rule(lark: LarkText, wanted: WantedConstraint) -> str:
    """The name of a rule for the whole content."""
    return _RULES[wanted.kind](lark, wanted)


def _json_schema(lark: LarkText, wanted: WantedConstraint) -> str:
    return lark.json(checked_schema(wanted.value, wanted.field).written())


def _json_object(lark: LarkText, wanted: WantedConstraint) -> str:  # noqa: ARG001  it has no value
    return lark.json({"type": "object"})


def _regex(lark: LarkText, wanted: WantedConstraint) -> str:
    """The regular expression must match the whole content, as in vLLM."""
    try:
        pattern = whole_text_pattern(_text(wanted), is_search=False)
    except PatternRefused as error:
        raise ConstraintRefused(wanted.field, "", f"the regular expression {error}") from None
    return lark.terminal(f"/{pattern}/" if pattern else '""')


def _text(wanted: WantedConstraint) -> str:
    if not isinstance(wanted.value, str):
        raise ConstraintRefused(wanted.field, "", "must be a string")
    return wanted.value


def _choice(lark: LarkText, wanted: WantedConstraint) -> str:
    texts = wanted.value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConstraintRefused(wanted.field, "", "must be a list of strings that is not empty")
    if len(texts) > CHOICES_MAX or sum(map(len, texts)) > CHOICE_CHARS_MAX:
        raise ConstraintRefused(wanted.field, "", f"has more than {CHOICES_MAX} texts or {CHOICE_CHARS_MAX} characters")
    return lark.terminal(" | ".join(quoted(text) for text in dict.fromkeys(texts)))


def _grammar(lark: LarkText, wanted: WantedConstraint) -> str:
    return lark_rule(lark, _text(wanted), wanted.field)


def _structural_tag(lark: LarkText, wanted: WantedConstraint) -> str:
    """Free text in which each trigger must be followed by the rest of a tag that begins with it."""
    value = parsed_json(wanted.value, wanted.field) if isinstance(wanted.value, str) else wanted.value
    if not isinstance(value, dict) or "structures" not in value or "triggers" not in value:
        reason = "must have 'structures' and 'triggers'; the form with 'format' is not supported"
        raise ConstraintRefused(wanted.field, "", reason)
    triggers = _triggers(value["triggers"], wanted.field)
    by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for at, tag in enumerate(_tags(value["structures"], wanted.field)):
        begin, rule = _tag(lark, tag, wanted.field, at)
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if trigger is None:
            raise ConstraintRefused(wanted.field, f"/structures/{at}/begin", "'begin' starts with none of the triggers")
        rest = begin[len(trigger) :]
        by_trigger[trigger].append(f"{lark.literal(rest)} {rule}" if rest else rule)
    parts = [
        lark.rule(f"{lark.text_up_to(trigger, [other for other in triggers if other != trigger])} ({' | '.join(rules)})")
        for trigger, rules in by_trigger.items()
        if rules
    ]
    return lark.rule(f"({' | '.join(parts)})* {lark.text_without(triggers)}")


def _triggers(value: object, field: str) -> list[str]:
    if not isinstance(value, list) or not value or len(value) > TAGS_MAX:
        raise ConstraintRefused(field, "/triggers", f"'triggers' must be a list of 1 to {TAGS_MAX} strings")
    texts = [one for one in value if isinstance(one, str) and one]
    if len(texts) < len(value) or any(a != b and a in b for a in texts for b in texts):
        raise ConstraintRefused(field, "/triggers", "'triggers' must be texts of which none is a part of another")
    return list(dict.fromkeys(texts))


def _tags(value: object, field: str) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value or len(value) > TAGS_MAX or not all(isinstance(one, dict) for one in value):
        raise ConstraintRefused(field, "/structures", f"'structures' must be a list of 1 to {TAGS_MAX} objects")
    return value


def _tag(lark: LarkText, tag: Mapping[str, object], field: str, at: int) -> tuple[str, str]:
    begin, end, path = tag.get("begin"), tag.get("end"), f"/structures/{at}"
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ConstraintRefused(field, path, "a tag must have 'begin' and 'end', which are strings")
    schema = checked_schema(tag.get("schema", {}), field, f"{path}/schema", f"s{at}d")
    return begin, lark.rule(f"{lark.json(schema.written())} {lark.literal(end)}" if end else lark.json(schema.written()))


_RULES: Mapping[ConstraintKind, Callable[[LarkText, WantedConstraint], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.STRUCTURAL_TAG: _structural_tag,
}
