"""As much of Google's APIs as tells of an instance group, for its true client."""

import functools
import json

from helpers.http_answers import Answers

TOKEN = "token-of-the-account"


class Group(Answers):
    """An instance group."""

    def __init__(self, instances):
        super().__init__(self._answer)
        self.instances = instances
        self.page = 2

    def _answer(self, method, path, query, body):
        if path == "/token":
            return 200, {"access_token": TOKEN, "expires_in": 3600}
        start = "/projects/project/zones/us-east1-d/"
        if not path.startswith(start):
            return 404, {"error": {"message": f"The resource {path!r} was not found"}}
        kind, name, *rest = path.removeprefix(start).split("/")
        if (method, kind, name, rest) == (
            "POST",
            "instanceGroups",
            "group",
            ["listInstances"],
        ):
            assert json.loads(body) == {"instanceState": "RUNNING"}
            return 200, self._listed(int(query.get("pageToken", 0)))
        if (method, kind) == ("GET", "instances") and name in self.instances:
            address = self.instances[name]
            interface = {"networkIP": address} if address else {}
            return 200, {"name": name, "networkInterfaces": [interface]}
        return 404, {"error": {"message": f"The resource {name!r} was not found"}}

    def _listed(self, first):
        names = sorted(self.instances)[first : first + self.page]
        place = (
            "https://www.googleapis.com/compute/v1/projects/project/zones/us-east1-d"
        )
        # Without instances, Google leaves `items` out.
        listed = {
            "items": [{"instance": f"{place}/instances/{name}"} for name in names]
        }
        listed = listed if names else {}
        if first + self.page < len(self.instances):
            listed["nextPageToken"] = str(first + self.page)
        return listed


class Metadata(Answers):
    """The metadata server of an instance with this address."""

    def __init__(self, ip):
        super().__init__(self._answer)
        self.ip = ip

    def _answer(self, method, path, query, body):
        account = "instance/service-accounts/default/"
        told = {
            "": "ok",
            "project/project-id": "project",
            "instance/network-interfaces/0/ip": self.ip,
            account: {"email": "a@b.c", "scopes": [], "aliases": ["default"]},
            f"{account}token": {"access_token": TOKEN, "expires_in": 3600},
        }
        asked = path.removeprefix("/").removeprefix("computeMetadata/v1/")
        return (200, told[asked]) if asked in told else (404, "not found")


def redirected(build, address):
    """Google's `build`, of clients that ask the server at `address`."""
    options = {"api_endpoint": f"http://{address}"}
    return functools.partial(build, client_options=options)


def account_file(folder, address):
    """The key of a service account, whose tokens the server at `address` gives out."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "account.json"
    path.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": "project",
                "private_key_id": "1",
                "private_key": private.decode(),
                "client_email": "a@b.c",
                "token_uri": f"http://{address}/token",
            }
        )
    )
    return path
