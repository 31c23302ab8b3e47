#!/bin/sh
# What the image runs. SageMaker starts it with the word "serve", and Vertex AI sets the port; both mount or copy a model.
set -e
[ "$1" = serve ] && shift
exec torchlake serve "${MODEL:-/opt/ml/model}" --host 0.0.0.0 --port "${AIP_HTTP_PORT:-8080}" "$@"
