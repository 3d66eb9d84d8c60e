"""Certificates and keys: the federation's authority, the server's certificate, the nodes' keys.

Flower expects certificates as PEM, and node keys on the curve P-384 in OpenSSH's format.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from motley.files import write_secret

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
    (folder / "key.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )


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
