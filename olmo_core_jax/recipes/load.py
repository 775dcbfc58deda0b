"""From a name or a file to a validated recipe with absolute paths, and its digest."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import ValidationError

from olmo_core_jax import storage
from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Recipe
from olmo_core_jax.yaml_text import parse_yaml

SHIPPED = Path(__file__).parent


def shipped_recipes() -> list[str]:
    """Names of the recipes in this package."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name or file, its relative paths resolved against the file's folder.

    Raises UserError that names the file and the field.
    """
    where = recipe_location(name_or_path)
    return parse_recipe(_read(where), where, _folder(where))


def recipe_of_run(run_root: str) -> Recipe:
    """The recipe that a run root was made with. Raises UserError where there is no run."""
    where = storage.join(run_root, "recipe.yaml")
    if not storage.exists(where):
        raise UserError(f"{run_root} holds no run: there is no recipe.yaml")
    return load_recipe(where)


def base_location(name_or_path: str) -> str | None:
    """The file or URI of the recipe that this one `extends`; None where it extends none. Raises UserError."""
    return _split(recipe_location(name_or_path))[0]


def _folder(where: str) -> str:
    folder = where.rpartition("/")[0] or "."
    return folder if storage.is_remote(where) else str(Path(folder).resolve())


def _read(where: str, below: tuple[str, ...] = ()) -> dict:
    """A recipe file's content over that of the recipe it `extends`. Raises UserError where that goes round in a circle."""
    if where in below:
        raise UserError(f"recipe {below[0]} extends itself: {' -> '.join((*below, where))}")
    base, raw = _split(where)
    if base is None:
        return raw
    inherited = _read(base, (*below, where))
    if _folder(base) != _folder(where):  # a shipped one: its paths are relative to its own folder
        inherited = _absolute(inherited, _folder(base))
    return _merge(inherited, raw)


def _split(where: str) -> tuple[str | None, dict]:
    """Where the recipe is that a file `extends`: in the same folder, else a shipped one. And the rest of its content."""
    try:
        text = storage.read_text(where)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"recipe {where} cannot be read: {e}") from None
    raw = parse_yaml(text, f"recipe {where}")
    if not isinstance(raw, dict):
        raise UserError(
            f"recipe {where}: a mapping of sections is expected, not {type(raw).__name__}"
        )
    base = raw.pop("extends", None)
    if base is None:
        return None, raw
    if not isinstance(base, str) or "/" in base:
        raise UserError(f"recipe {where}: extends is the name of a recipe, not {base!r}")
    beside = storage.join(_folder(where), f"{base}.yaml")
    return (beside if storage.exists(beside) else recipe_location(base)), raw


def _merge(base: dict, over: dict) -> dict:
    """over's values in base's places; sections of both are merged, except where `kind` says they differ in kind."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        if isinstance(mine, dict) and isinstance(value, dict) and "kind" not in value:
            merged[key] = _merge(mine, value)
        else:
            merged[key] = value
    return merged


def recipe_location(name_or_path: str) -> str:
    """The file or URI of a recipe. Raises UserError, listing the shipped ones."""
    if storage.is_remote(name_or_path):
        return name_or_path
    for path in (Path(name_or_path), SHIPPED / f"{name_or_path}.yaml"):
        if path.is_file():
            return str(path)
    raise UserError(
        f"unknown recipe {name_or_path!r}: neither a file nor one of {', '.join(shipped_recipes())}"
    )


def parse_recipe(raw: dict, where: str, folder: str) -> Recipe:
    """Validates a recipe's content. `folder` is what relative paths are relative to."""
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise UserError(f"recipe {where}: " + "; ".join(_reasons(e))) from None
    return Recipe.model_validate(_absolute(recipe.model_dump(), folder))


def digest(recipe: Recipe) -> str:
    """sha256 of what the recipe says. Folders do not enter, so a moved checkout is the same recipe."""
    text = json.dumps(_absolute(recipe.model_dump(), None), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def dump_recipe(recipe: Recipe) -> str:
    """YAML that load_recipe reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False)


# The fields that hold paths: (section, field); their values are strings, or mappings to strings. Two kinds of names are no
# paths: `hub:OWNER/MODEL`, and a mix without a slash or a dot, which ai2-olmo-core ships.
PATHS = {
    ("tokenizer", "path"),
    ("weights", "hf"),
    ("weights", "parity"),
    ("data", "mix"),
    ("data", "base"),
    ("reference", "curve"),
    ("reference", "band"),
    ("reference", "batches"),
    ("reference", "hf"),
    ("reference", "native"),
    ("reference", "heldout"),
    ("reference", "lm_eval"),
    ("evaluation", "heldout"),
    ("evaluation", "tasks_path"),
}


def _absolute(node: dict, folder: str | None, section: str = "") -> dict:
    """A copy with every path field resolved against `folder`, or reduced to its last name (folder None)."""

    def resolve(key, value):
        if isinstance(value, dict):
            return {k: resolve(key, v) for k, v in value.items()}
        if value is None or value.startswith("hub:"):
            return value
        if key == "mix" and not set("/.") & set(value):
            return value
        if folder is None:
            return value.rstrip("/").rpartition("/")[2]
        return value if "://" in value or value.startswith("/") else storage.join(folder, value)

    out = {}
    for key, value in node.items():
        if (section, key) in PATHS:
            out[key] = resolve(key, value)
        elif isinstance(value, dict):
            out[key] = _absolute(value, folder, key)
        else:
            out[key] = value
    return out


def missing_files(recipe: Recipe) -> list[str]:
    """The local files and folders that a recipe names and that are not there, each with its field. URIs are not asked."""

    def look(node: dict, path: tuple[str, ...]) -> list[str]:
        found = []
        for key, value in node.items():
            here = (*path, str(key))
            if isinstance(value, dict):
                found += look(value, here)
            elif any(pair in PATHS for pair in pairwise(here[-3:])):
                local = isinstance(value, str) and value.startswith("/")
                if local and not Path(value).exists():
                    found.append(f"{'.'.join(here)}: {value}")
        return found

    return look(recipe.model_dump(), ())


def _reasons(error: ValidationError) -> list[str]:
    reasons = []
    for e in error.errors():
        field = ".".join(str(part) for part in e["loc"]) or "recipe"
        said = e["msg"].removeprefix("Value error, ")
        reasons.append(
            f"unknown key {field}" if e["type"] == "extra_forbidden" else f"{field}: {said}"
        )
    return reasons
