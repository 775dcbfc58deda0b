"""A manifest checked before it is sent: against the JobSet CRD, the core Job schema, and rules that neither can say.

The CRD is the cluster's own (read at submission) or a file's; the core schemas are those of the `kubernetes-validate`
package. What is not at hand is left to the API server, which is always asked with fieldValidation=Strict.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from olmo_core_jax.errors import UserError

Object = dict[str, Any]

KUBERNETES = "1.34"
LONGEST_NAME = 63
MOST_EXIT_CODES = 255


def check(manifest: Object, crd: Object | None = None) -> None:
    """Raises UserError with the field's path and the fault, one line each."""
    found = [*core_problems(manifest), *(crd_problems(manifest, crd) if crd else ())]
    found = found or list(rules(manifest))
    if found:
        raise UserError("\n".join([f"{manifest['kind']} manifest is wrong:", *sorted(set(found))]))


def load_crds(folder: str) -> dict[str, Object]:
    """CustomResourceDefinitions of a folder's YAML files, by kind."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # Kueue's files have megabytes
    documents = [yaml.load(p.read_text(), loader) for p in sorted(Path(folder).glob("*.yaml"))]
    crds = [d for d in documents if d and d.get("kind") == "CustomResourceDefinition"]
    return {d["spec"]["names"]["kind"]: d for d in crds}


def crd_problems(manifest: Object, crd: Object) -> Iterator[str]:
    """Departures from a CRD's structural schema; unknown fields are departures. Needs the jsonschema package."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        return
    version = manifest["apiVersion"].rpartition("/")[2]
    served = {v["name"]: v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"]}
    if version not in served:
        yield f"apiVersion: the cluster serves {', '.join(served)}, not {version}"
        return
    for error in Draft202012Validator(_closed(served[version], top=True)).iter_errors(manifest):
        yield f"{path(error.absolute_path)}: {error.message[:300]}"


def core_problems(manifest: Object) -> Iterator[str]:
    """Departures of the child Jobs from batch/v1. Needs the kubernetes-validate package."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    for i, replicated in enumerate((manifest.get("spec") or {}).get("replicatedJobs") or []):
        template = replicated.get("template") or {}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        try:
            kubernetes_validate.validate(
                job | {"spec": template.get("spec")}, KUBERNETES, strict=True
            )
        except kubernetes_validate.ValidationError as e:
            where = ["spec", "replicatedJobs", i, "template", *e.absolute_path]
            yield f"{path(where)}: {e.message[:300]}"


def rules(manifest: Object) -> Iterator[str]:
    """What webhooks and the Job controller refuse although the schemas allow it."""
    name = (manifest.get("metadata") or {}).get("name", "")
    for i, replicated in enumerate((manifest.get("spec") or {}).get("replicatedJobs") or []):
        where = f"spec.replicatedJobs[{i}]"
        job = (replicated.get("template") or {}).get("spec") or {}
        slices, hosts = replicated.get("replicas", 1), job.get("parallelism", 1)
        pod = f"{name}-{replicated.get('name')}-{slices - 1}-{hosts - 1}-abcde"
        if len(pod) > LONGEST_NAME:
            yield f"metadata.name: pods would be called {pod}, longer than {LONGEST_NAME} characters"
        yield from _job_rules(job, f"{where}.template.spec")


def _job_rules(job: Object, where: str) -> Iterator[str]:
    pod = (job.get("template") or {}).get("spec") or {}
    names = {c.get("name") for c in pod.get("containers") or []}
    policy = (job.get("podFailurePolicy") or {}).get("rules") or []
    if policy and pod.get("restartPolicy") != "Never":
        yield f"{where}.template.spec.restartPolicy: podFailurePolicy needs Never"
    for i, rule in enumerate(policy):
        codes = rule.get("onExitCodes") or {}
        at = f"{where}.podFailurePolicy.rules[{i}].onExitCodes"
        values = codes.get("values") or []
        if codes.get("containerName") not in {None, *names}:
            yield f"{at}.containerName: there is no container {codes['containerName']!r}"
        if codes.get("operator") == "In" and 0 in values:
            yield f"{at}.values: 0 cannot be listed with In"
        if values != sorted(set(values)) or len(values) > MOST_EXIT_CODES:
            yield f"{at}.values: at most {MOST_EXIT_CODES} different codes in rising order"
    mounts = {
        m.get("name") for c in pod.get("containers") or [] for m in c.get("volumeMounts") or []
    }
    for name in sorted(mounts - {v.get("name") for v in pod.get("volumes") or []}):
        yield f"{where}.template.spec.volumes: a container mounts {name!r}, which is not there"


def path(parts) -> str:
    """spec.replicatedJobs[0].template, as Kubernetes writes paths."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "manifest"


def _closed(node: Any, top: bool = False) -> Any:
    """A structural schema as JSON Schema: unknown fields refused, integers and quantities as Kubernetes reads them."""
    if isinstance(node, list):
        return [_closed(n) for n in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        kept = {k: node[k] for k in ("pattern",) if k in node}
        return {"type": ["integer", "string"], **kept}
    out = {
        k: _closed(v)
        for k, v in node.items()
        if not k.startswith("x-") and k not in ("properties", "nullable")
    }
    if isinstance(node.get("properties"), dict):
        out["properties"] = {k: _closed(v) for k, v in node["properties"].items()}
        if top:
            out["properties"]["metadata"] = {"type": "object"}
        if (
            not node.get("x-kubernetes-preserve-unknown-fields")
            and "additionalProperties" not in node
        ):
            out["additionalProperties"] = False
    if node.get("nullable"):
        out = {"anyOf": [out, {"type": "null"}]}
    return out
