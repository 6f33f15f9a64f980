# syntax=docker/dockerfile:1
ARG PYTHON=3.13-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
# A virtual environment without pip: nothing in the image installs anything.
RUN python -m venv --without-pip /opt/kvproxy
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kvproxy ./kvproxy
RUN pip install --no-cache-dir --constraint constraints.txt pip
RUN pip --python /opt/kvproxy/bin/python install --no-cache-dir --constraint constraints.txt \
    --build-constraint constraints.txt ".[otel,picker,redis,nats]"

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="kvproxy" \
    org.opencontainers.image.description="KV-cache-aware reverse proxy for LLM engines" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin kvproxy
COPY --from=build /opt/kvproxy /opt/kvproxy
ENV PATH=/opt/kvproxy/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KVPROXY_HEALTH_URL=http://127.0.0.1:8889/healthz
USER 10001:10001
EXPOSE 8888 8889
# Asks the admin listener, past any proxy that the environment names. Another `admin` port needs another KVPROXY_HEALTH_URL.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(os.environ['KVPROXY_HEALTH_URL'], timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvproxy"]
CMD ["serve", "-c", "/etc/kvproxy/config.yaml"]
