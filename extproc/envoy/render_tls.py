"""Renders TLS of the public listener.

Envoy reads certificates anew only when they come through its secret discovery, so the configuration names a small file
beside it for each secret, and that file names the certificate's own. Envoy watches the folders of both.
"""

from pathlib import Path

import yaml
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    DataSource,
    PathConfigSource,
    TransportSocket,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    DownstreamTlsContext,
    SdsSecretConfig,
    Secret,
    TlsCertificate,
    TlsParameters,
    TlsParametersTlsProtocol,
)
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config
from extproc.envoy.render_parts import proto_name
from extproc.errors import ConfigError

_VERSIONS = {"1.2": TlsParametersTlsProtocol.TLSv1_2, "1.3": TlsParametersTlsProtocol.TLSv1_3}
_PROTOCOLS = ("h2", "http/1.1")
_CERTIFICATE = "warmpath-certificate"
_CLIENTS = "warmpath-clients"


def secrets(config: Config) -> dict[str, str]:
    """Names and contents of the files that have to lie beside the rendered configuration; none without TLS."""
    tls = config.gateway.tls
    found = []
    if tls.certificate:
        pair = TlsCertificate(
            certificate_chain=DataSource(filename=tls.certificate), private_key=DataSource(filename=tls.key)
        )
        found.append(Secret(name=_CERTIFICATE, tls_certificate=pair))
    if tls.client_ca:
        authorities = CertificateValidationContext(trusted_ca=DataSource(filename=tls.client_ca))
        found.append(Secret(name=_CLIENTS, validation_context=authorities))
    return {_file(secret.name): _discovered(secret) for secret in found}


def transport_socket(config: Config, folder: Path | None) -> TransportSocket | None:
    """The socket of the public listener; None without TLS.

    Args:
        config: the checked configuration.
        folder: absolute path of where the files of `secrets` lie.

    Raises:
        ConfigError: there is TLS and no folder.
    """
    tls = config.gateway.tls
    if not tls.certificate:
        return None
    if folder is None:
        raise ConfigError(
            "gateway.tls: Envoy needs a file for each secret beside its configuration: give --output FILE"
        )
    common = CommonTlsContext(
        tls_params=TlsParameters(tls_minimum_protocol_version=_VERSIONS[tls.min_version]),
        alpn_protocols=list(_PROTOCOLS),
        tls_certificate_sds_secret_configs=[_reference(_CERTIFICATE, folder)],
        validation_context_sds_secret_config=_reference(_CLIENTS, folder) if tls.client_ca else None,
    )
    context = DownstreamTlsContext(
        common_tls_context=common, require_client_certificate=True if tls.client_ca else None
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _reference(name: str, folder: Path) -> SdsSecretConfig:
    return SdsSecretConfig(
        name=name,
        sds_config=ConfigSource(
            resource_api_version=ApiVersion.V3, path_config_source=PathConfigSource(path=str(folder / _file(name)))
        ),
    )


def _file(name: str) -> str:
    return f"{name}.yaml"


def _discovered(secret: Secret) -> str:
    """A discovery response of one secret, as Envoy reads it from a file."""
    plain = Any.pack(secret).to_dict(casing=proto_name)
    return yaml.safe_dump({"resources": [plain]}, sort_keys=False, width=110)
