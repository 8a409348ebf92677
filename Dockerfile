# onecurve on a CPU, for a class or a laptop:
#
#   docker build -t onecurve .
#   docker run -it --rm onecurve                    # then as in README.md
#
# For amd64. On arm64 the trainer's pieces compute the same bits (tests/aarch64.sh), but the engine has not run there: so
# an image for it is refused below, rather than made and not tested.
FROM python:3.11-slim-bookworm
RUN test "$(uname -m)" = x86_64 || { echo "onecurve: no image for $(uname -m); use --platform linux/amd64"; exit 1; }
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap git && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
WORKDIR /onecurve
COPY pyproject.toml README.md ./
COPY docs/without_a_gpu.txt docs/
# The libraries in a layer of their own: they change less often than the code.
RUN uv sync --no-cache --no-dev --group plot $(sed 's/^/--no-install-package=/' docs/without_a_gpu.txt)
ENV UV_NO_SYNC=1
# With .git, so that a run names its commit.
COPY . .
CMD ["bash"]
