"""YAML as people write it: a key that is given twice is refused, and what is wrong fits on one line."""

from typing import Any

import yaml

from olmo_core_jax.errors import UserError


class _Loader(yaml.SafeLoader):
    """Plain YAML takes the last of two equal keys without a word. Merged keys (`<<`) may be given again."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            if name and key.tag != "tag:yaml.org,2002:merge":
                seen.add(name)
        return node


def parse_yaml(text: str, what: str) -> Any:
    """The content of a YAML (or JSON) text; None for an empty one. what: its name in messages.

    Raises UserError with what is wrong and where, on one line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        mark, said = e.problem_mark or e.context_mark, e.problem or e.context
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{what} is not valid YAML: {place}{one_line(said)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # a date that is none, for one
        raise UserError(f"{what} is not valid YAML: {one_line(e)}") from None


def one_line(text: object) -> str:
    return " ".join(str(text).split())
