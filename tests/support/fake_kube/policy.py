"""podFailurePolicy of a Job and failurePolicy of a JobSet: what a failed pod leads to."""

import re


def job_failure(jobset: dict, failed: list[dict]) -> tuple[str, str]:
    """Reason and message of the Job's Failed condition, from podFailurePolicy (a match beats the backoff limit)."""
    rules = (
        jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        .get("podFailurePolicy", {})
        .get("rules", [])
    )
    for pod in failed:
        where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        for index, rule in enumerate(rules):
            if text := matches(rule, pod, where):
                if rule["action"] == "FailJob":
                    return "PodFailurePolicy", f"{text} matching FailJob rule at index {index}"
                break
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def matches(rule: dict, pod: dict, where: str) -> str:
    for wanted in rule.get("onPodConditions") or []:
        for c in pod["status"].get("conditions", []):
            if (c["type"], c["status"]) == (wanted["type"], wanted.get("status", "True")):
                return f"Pod {where} has condition {c['type']}"
    if codes := rule.get("onExitCodes"):
        for status in pod["status"].get("containerStatuses", []):
            code = status["state"]["terminated"]["exitCode"]
            inside = code in codes["values"]
            if (
                code
                and status["name"] == codes.get("containerName", status["name"])
                and inside == (codes["operator"] == "In")
            ):
                return f"Container {status['name']} for pod {where} failed with exit code {code}"
    return ""


def jobset_action(policy: dict, reason: str, message: str) -> str:
    """The first rule that fits; RestartJobSet where none does."""
    for rule in policy.get("rules") or []:
        reasons, patterns = (
            rule.get("onJobFailureReasons") or [],
            rule.get("onJobFailureMessagePatterns") or [],
        )
        if (not reasons or reason in reasons) and (
            not patterns or any(re.search(p, message) for p in patterns)
        ):
            return rule["action"]
    return "RestartJobSet"
