"""An issuer of JSON Web Tokens (RFC 7519), signed with ES256, and the public keys that it shows (RFC 7517)."""

import base64
import json
import time
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

ISSUER = "https://issuer.example"
AUDIENCE = "warmpath"
_COORDINATE_BYTES = 32


class Issuer:
    """Signs tokens with a key of its own; `name` tells that key from others."""

    def __init__(self, name: str = "one") -> None:
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def jwks(self) -> str:
        """Its public key, as Envoy reads it."""
        numbers = self._key.public_key().public_numbers()
        point = {name: _text(_whole(value)) for name, value in (("x", numbers.x), ("y", numbers.y))}
        return json.dumps({"keys": [{"kty": "EC", "crv": "P-256", "alg": "ES256", "kid": self._name, **point}]})

    def token(self, **claims: Any) -> str:
        """A good token for tenant `acme`; claims are laid over its own, and those that are None left out."""
        whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "acme", **claims}
        payload = {name: value for name, value in whole.items() if value is not None}
        signed = f"{_part({'alg': 'ES256', 'kid': self._name, 'typ': 'JWT'})}.{_part(payload)}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_text(_whole(r) + _whole(s))}"


def unsigned(**claims: Any) -> str:
    """A token that says it needs no signature."""
    payload = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "acme", **claims}
    return f"{_part({'alg': 'none', 'typ': 'JWT'})}.{_part(payload)}."


def _part(value: dict[str, Any]) -> str:
    return _text(json.dumps(value).encode())


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _whole(value: int) -> bytes:
    return value.to_bytes(_COORDINATE_BYTES, "big")
