"""As much of the API of Kubernetes as lists pods, for its true client."""

import datetime
import ipaddress
import json
import ssl

from helpers.http_answers import Answers

TOKEN = "token-of-the-service-account"


def pod(name, ip="10.0.0.1", job="train", phase="Running", **more):
    """A pod as Kubernetes writes it."""
    metadata = {
        "name": name,
        "namespace": more.get("namespace", "default"),
        "labels": {"job-name": job},
    }
    if "deleted" in more:
        metadata["deletionTimestamp"] = more["deleted"]
    spec = {"containers": [{"name": "main", "image": "python"}]}
    if "hostname" in more:
        spec["hostname"] = more["hostname"]
    status = {"phase": phase, "hostIP": more.get("host_ip", "192.168.0.9")}
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {"metadata": metadata, "spec": spec, "status": status}


class Pods(Answers):
    """Lists `pods`, which may change; `forbidden` is what nobody may list."""

    def __init__(self, pods):
        super().__init__(self._answer)
        self.pods = pods
        self.forbidden = None

    def _answer(self, method, path, query, body):
        if method != "GET" or not path.endswith("/pods") or path == self.forbidden:
            reason = "pods is forbidden: User cannot list resource"
            return 403, {"kind": "Status", "status": "Failure", "message": reason}
        name, _, value = query["labelSelector"].partition("=")
        parts = path.split("/")
        found = [
            each
            for each in self.pods
            if each["metadata"]["labels"].get(name) == value
            and parts[3:4] in (["pods"], ["namespaces"])
            and (parts[3] == "pods" or parts[4] == each["metadata"]["namespace"])
        ]
        # Kubernetes promises no order.
        return 200, {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"},
            "items": found[::-1],
        }


def kubeconfig(folder, address):
    """A file with which `OFF_CLUSTER` finds the server."""
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://{address}"}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))  # which is YAML
    return path


def service_account(folder):
    """The token and the certificate of a service account, and TLS of the server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(today - datetime.timedelta(1))
        .not_valid_after(today + datetime.timedelta(1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    token, authority, secret = (folder / n for n in ("token", "ca.crt", "key.pem"))
    token.write_text(TOKEN)
    authority.write_bytes(certificate.public_bytes(pem))
    secret.write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, secret)
    return token, authority, context
