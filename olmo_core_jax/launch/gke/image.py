"""Does an image exist? One manifest request to its registry, as a node's container runtime makes it."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

SECONDS = 20.0
ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)


def parse(reference: str) -> tuple[str, str, str]:
    """(registry host, repository, tag or digest). A name without a host is Docker Hub's."""
    rest, at, digest = reference.partition("@")
    host, slash, repository = rest.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, repository = "registry-1.docker.io", rest if slash else f"library/{rest}"
    name, colon, tag = repository.rpartition(":")
    if at:
        return host, name if colon else repository, digest
    return (host, name, tag) if colon else (host, repository, "latest")


def exists(reference: str) -> bool:
    """True or False as the registry says. Raises OSError where it does not say (no network, no permission)."""
    host, repository, version = parse(reference)
    scheme = "http" if host.split(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{host}/v2/{repository}/manifests/{version}"
    try:
        _head(url, {})
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return False
        if e.code != 401:
            raise
        return _exists_with_token(url, e.headers.get("WWW-Authenticate", ""))
    return True


def _exists_with_token(url: str, challenge: str) -> bool:
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not realm:
        raise PermissionError("the registry wants credentials of an unknown kind")
    token = _google_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(fields)}", headers=headers)
    with urllib.request.urlopen(asked, timeout=SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    bearer = answer.get("token") or answer.get("access_token")
    try:
        _head(url, {"Authorization": f"Bearer {bearer}"})
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return False
        raise
    return True


def _head(url: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT} | headers, method="HEAD")
    with urllib.request.urlopen(request, timeout=SECONDS):
        pass


def _google_token() -> str | None:
    """An access token of the ambient Google credentials; None where there are none."""
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests
    except ImportError:
        return None
    try:
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        credentials, _ = google.auth.default(scopes=scopes)
        credentials.refresh(google.auth.transport.requests.Request())
        return credentials.token
    except google.auth.exceptions.GoogleAuthError:
        return None
