"""Certificates for TLS tests, made anew for each of them."""

from pathlib import Path
from typing import NamedTuple

import trustme


class Pair(NamedTuple):
    """Files of a certificate and its key, PEM."""

    certificate: Path
    key: Path


def tls_arguments(authority: "Authority", pair: Pair, clients: str = "no") -> tuple[str, ...]:
    """Command line arguments of a server that shows this certificate, all but its port."""
    return (
        *("--tls-auth-clients", clients, "--tls-ca-cert-file", str(authority.file)),
        *("--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key)),
    )


class Authority:
    """An authority that nobody trusts but who is given its file.

    Args:
        folder: where its files go.
        name: first part of their names.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, *hosts: str) -> Pair:
        """A certificate for these names or addresses, with its key."""
        issued = self._ca.issue_cert(*hosts)
        place = f"{self._name}-{hosts[0].replace('.', '-')}"
        pair = Pair(self._folder / f"{place}.pem", self._folder / f"{place}.key")
        issued.cert_chain_pems[0].write_to_path(str(pair.certificate))
        issued.private_key_pem.write_to_path(str(pair.key))
        return pair
