# syntax=docker/dockerfile:1
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvproxy ./kvproxy
RUN python -m venv /opt/kvproxy \
    && /opt/kvproxy/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/kvproxy /opt/kvproxy
RUN useradd --system --uid 10001 --no-create-home kvproxy
USER 10001
ENV PATH=/opt/kvproxy/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8888 8889
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8889/healthz', timeout=2)"]
ENTRYPOINT ["kvproxy"]
CMD ["serve", "-c", "/etc/kvproxy/config.yaml"]
