"""Certificates and keys: the federation's authority, the server's certificate, the nodes' keys.

Flower expects certificates as PEM, and node keys on the curve P-384 in OpenSSH's format. A node's
private key should be made on the node's machine (`make_node_key`) and never leave it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from motley.core.errors import MotleyError
from motley.files import write_atomically, write_secret

VALID = timedelta(days=730)


def write_certificates(folder: Path, host: str) -> None:
    """Write ca.crt, ca.key, server.pem and server.key for a server that nodes reach as `host`."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    # The host is in the alternative names only: a common name has at most 64 characters.
    issuer, subject = _name("Motley federation"), _name("Motley server")
    signing = x509.BasicConstraints(ca=True, path_length=0)
    root = _certificate(issuer, issuer, authority.public_key()).add_extension(
        signing, critical=True
    )
    names = x509.SubjectAlternativeName(
        [_reached_as(host), x509.DNSName("localhost"), _reached_as("127.0.0.1")]
    )
    plain = x509.BasicConstraints(ca=False, path_length=None)
    leaf = _certificate(subject, issuer, server.public_key()).add_extension(names, critical=False)
    leaf = leaf.add_extension(plain, critical=True)
    folder.mkdir(parents=True)
    for name, builder in (("ca.crt", root), ("server.pem", leaf)):
        (folder / name).write_bytes(
            builder.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)
        )
    for name, key in (("ca.key", authority), ("server.key", server)):
        write_secret(
            folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )


def write_node_key(folder: Path) -> None:
    """Write a node's key and key.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        folder / "key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    )
    write_atomically(
        folder / "key.pub",
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n",
    )


def make_node_key(folder: Path, *, replace: bool = False) -> str:
    """Make a node's key pair on its own machine; return the fingerprint of the public key."""
    private, public = folder / "key", folder / "key.pub"
    if not folder.is_dir():
        raise MotleyError(f"{folder}: there is no such folder.")
    if not replace:
        for file in (private, public):
            if file.exists():
                raise MotleyError(
                    f"{file}: exists already. With --replace a new key takes its place, "
                    "which the server has to admit."
                )
    try:
        private.unlink(missing_ok=True)
        write_node_key(folder)
        return fingerprint_of(public.read_bytes())
    except OSError as error:
        raise MotleyError(f"{folder}: a key cannot be written there: {error.strerror}.") from None


def read_public_key(file: Path) -> bytes:
    """Return a node's public key in the encoding of Flower's API."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise MotleyError(f"{file}: is not a public key: {error}") from None
    return parse_public_key(content, str(file))


def parse_public_key(content: bytes, name: str) -> bytes:
    """Return a public key in OpenSSH's format in the encoding of Flower's API.

    `name` says in messages where the key comes from.
    """
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise MotleyError(f"{name}: is not a public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise MotleyError(
            f"{name}: is not a public key on an elliptic curve, as `motley deploy keygen` makes "
            "them."
        )
    return public_key_to_bytes(key)


def fingerprint_of(public_key: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's format, as `ssh-keygen -l` prints it."""
    try:
        content = base64.b64decode(public_key.split()[1], validate=True)
    except (IndexError, binascii.Error):
        raise MotleyError("this is not a public key in OpenSSH's format.") from None
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _reached_as(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )
