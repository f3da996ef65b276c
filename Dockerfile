# Warmpath's own image: sidecar, simulator and command line. No Envoy, no Redis, no development tools.
#
#   docker build -t warmpath .                          dependencies from the package index
#   docker/wheels.sh && docker build -t warmpath .      from .docker/wheels: no index needed during the build
#
# Runs with a read-only root file system; the only place it writes to is /run/warmpath (sockets), a tmpfs.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY . .
RUN [ -d .docker/wheels ] || docker/wheels.sh
RUN python3 -m venv /opt/warmpath \
    && /opt/warmpath/bin/pip install --quiet --no-cache-dir --no-index --find-links .docker/wheels \
       --requirement docker/requirements.txt warmpath \
    && /opt/warmpath/bin/pip uninstall --yes --quiet setuptools pip

FROM ${PYTHON_IMAGE}
# A fixed numeric id, so that volumes and policies can name it.
RUN groupadd --gid 10001 warmpath \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin warmpath \
    && install -d -o warmpath -g warmpath /run/warmpath
COPY --from=build /opt/warmpath /opt/warmpath
ENV PATH=/opt/warmpath/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["warmpath"]
CMD ["--help"]
