"""Secrets are taken out by name and by shape; the names are those that the projects document."""

import json
import logging
from pathlib import Path

import pytest

from torchlake.cli.main import main
from torchlake.config.job import Job, flat, load_job
from torchlake.errors import ConfigError
from torchlake.redaction import REDACTED, redacted
from torchlake.reporting.report import report
from torchlake.runs import folder, metrics_log

SPARK = """
spark.authenticate.secret spark.connect.authenticate.token spark.ssl.keyPassword spark.ssl.keyStorePassword
spark.ssl.trustStorePassword spark.ssl.ui.keyStorePassword spark.ssl.historyServer.trustStorePassword
spark.hadoop.javax.jdo.option.ConnectionPassword spark.kubernetes.authenticate.driver.oauthToken
spark.kubernetes.authenticate.submission.oauthToken spark.executorEnv.AWS_SECRET_ACCESS_KEY
spark.sql.catalog.lake.credential spark.sql.catalog.lake.token spark.sql.catalog.lake.s3.secret-access-key
spark.sql.catalog.lake.s3.access-key-id spark.sql.catalog.lake.s3.session-token spark.databricks.service.token
"""
HADOOP = """
hadoop.tokens hadoop.zk.auth ha.zookeeper.auth hadoop.zk.ssl.keystore.password hadoop.zk.ssl.truststore.password
hadoop.security.group.mapping.ldap.bind.password hadoop.security.group.mapping.ldap.ssl.keystore.password
ssl.server.keystore.keypassword ssl.client.truststore.password
"""
S3A = """
fs.s3a.access.key fs.s3a.secret.key fs.s3a.session.token fs.s3a.encryption.key fs.s3a.server-side-encryption.key
fs.s3a.proxy.password fs.s3a.bucket.nightly.access.key fs.s3a.bucket.nightly.secret.key
fs.s3a.bucket.nightly.session.token fs.s3a.bucket.nightly.encryption.key fs.s3a.bucket.type.access.key
fs.s3.awsAccessKeyId fs.s3.awsSecretAccessKey fs.s3n.awsSecretAccessKey
"""
AZURE = """
fs.azure.account.key fs.azure.account.key.acct.dfs.core.windows.net fs.azure.account.key.acct.blob.core.windows.net
fs.azure.account.key.path.file.core.windows.net fs.azure.account.key.onelake.dfs.fabric.microsoft.com
fs.azure.account.oauth2.client.secret fs.azure.account.oauth2.client.secret.acct.dfs.core.windows.net
fs.azure.account.oauth2.client.secret.cache.dfs.core.windows.net fs.azure.account.oauth2.user.password
fs.azure.account.oauth2.refresh.token fs.azure.account.oauth2.refresh.token.acct.dfs.core.windows.net
fs.azure.sas.fixed.token fs.azure.sas.fixed.token.acct.dfs.core.windows.net
fs.azure.sas.fixed.token.lake.acct.dfs.core.windows.net fs.azure.sas.lake.acct.blob.core.windows.net
fs.azure.sas.files.acct.blob.core.windows.net fs.azure.client-provided-encryption-key
fs.azure.client-provided-encryption-key.acct.dfs.core.windows.net fs.adl.oauth2.credential
fs.adl.oauth2.refresh.token dfs.adls.oauth2.credential
"""
GCS = """
fs.gs.auth.service.account.private.key fs.gs.auth.service.account.private.key.id fs.gs.auth.client.secret
fs.gs.auth.refresh.token fs.gs.auth.service.account.json.keyfile fs.gs.auth.service.account.keyfile
google.cloud.auth.service.account.json.keyfile fs.gs.encryption.key fs.gs.encryption.key.hash fs.gs.proxy.password
"""
FSSPEC = """
storage_options.key storage_options.secret storage_options.token storage_options.account_key storage_options.sas_token
storage_options.connection_string storage_options.client_secret storage_options.credential storage_options.password
storage_options.client_kwargs.aws_secret_access_key storage_options.client_kwargs.aws_session_token
storage_options.s3_additional_kwargs.SSECustomerKey
"""
ENVIRONMENT = """
AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_SECURITY_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_KEY
AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS_TOKEN GOOGLE_APPLICATION_CREDENTIALS
GOOGLE_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACE_API_KEY WANDB_API_KEY MLFLOW_TRACKING_PASSWORD
MLFLOW_TRACKING_TOKEN MLFLOW_TRACKING_AWS_SECRET_ACCESS_KEY DATABRICKS_TOKEN DATABRICKS_CLIENT_SECRET COMET_API_KEY
NEPTUNE_API_TOKEN OPENAI_API_KEY GITHUB_TOKEN RAY_AUTH_TOKEN PGPASSWORD DB_PWD
"""
CREDENTIALS = " ".join((SPARK, HADOOP, S3A, AZURE, GCS, FSSPEC, ENVIRONMENT)).split()

HARMLESS = """
key data.key text label tokenizer tokenizer_file max_new_tokens batch_tokens micro_batch_tokens pad_token eos_token
bos_token tokens_per_s primary_key partition.keys sort_key monkey keyboard train.checkpoint_folder engine.name
spark.sql.shuffle.partitions spark.sql.mapKeyDedupPolicy spark.sql.sources.v2.bucketing.partitionKeyOrdering.enabled
spark.sql.legacy.parquet.nanosAsLong spark.executor.memory spark.master spark.authenticate spark.network.crypto.enabled
spark.authenticate.secretBitLength spark.authenticate.secret.file spark.io.encryption.keySizeBits spark.ssl.enabled
spark.ssl.keyStore spark.ssl.keyStoreType spark.network.crypto.keyLength spark.redaction.regex spark.kerberos.principal
spark.security.credentials.hive.enabled spark.security.credentials.renewalRatio spark.hadoop.fs.s3a.endpoint
hadoop.security.authentication hadoop.security.credential.provider.path hadoop.http.authentication.token.validity
fs.s3a.aws.credentials.provider fs.s3a.encryption.algorithm fs.s3a.signing-algorithm fs.s3a.delegation.token.binding
fs.s3a.assumed.role.arn fs.s3a.path.style.access fs.s3a.bucket.nightly.endpoint fs.azure.account.auth.type
fs.azure.account.oauth.provider.type fs.azure.account.oauth2.client.id fs.azure.account.oauth2.client.endpoint
fs.azure.account.oauth2.refresh.token.endpoint fs.azure.account.oauth2.msi.tenant fs.azure.sas.token.provider.type
fs.azure.account.keyprovider.acct.blob.core.windows.net fs.azure.account.hns.enabled fs.gs.project.id fs.gs.auth.type
fs.gs.auth.client.id fs.gs.auth.access.token.provider fs.gs.token.server.url fs.gs.encryption.algorithm
fs.gs.proxy.address storage_options.endpoint_url storage_options.anon storage_options.account_name AWS_REGION
AWS_PROFILE AWS_WEB_IDENTITY_TOKEN_FILE AZURE_CLIENT_ID MLFLOW_TRACKING_URI HF_HOME PWD TOKENIZERS_PARALLELISM
""".split()  # noqa: SIM905

JOB = load_job(None, data={"train": "t.parquet"}, model={"base": "m"})


def with_conf(**conf: str) -> Job:
    return load_job(
        None, data={"train": "t.parquet"}, model={"base": "m"}, engine={"name": "spark", "spark": {"conf": conf}}
    )


@pytest.mark.parametrize("name", CREDENTIALS)
def test_a_credential_is_known_by_its_name_wherever_it_stands(name: str) -> None:
    value = "Zm9v-plain/looking+value="
    assert redacted(value, name) == REDACTED
    assert redacted({name: value})[name] == REDACTED
    assert redacted({"engine": {"spark": {"conf": {f"spark.hadoop.{name}": value}}}}) == redacted(
        {"engine": {"spark": {"conf": {f"spark.hadoop.{name}": REDACTED}}}}
    )
    parts = name.split(".")
    nested: object = value
    for part in reversed(parts):
        nested = {part: nested}
    assert value not in str(redacted(nested))
    for text in (
        f"{name}={value}",
        f"{name}: {value}",
        f"refused: {name} = '{value}' there",
        json.dumps({name: value}),
    ):
        assert value not in redacted(text), text


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_credential_stays_readable(name: str) -> None:
    assert redacted("value", name) == "value"
    assert redacted({"conf": {name: "value"}}) == {"conf": {name: "value"}}
    assert redacted(f"{name}=value, {name}: value") == f"{name}=value, {name}: value"


def test_every_setting_of_a_job_stays_readable() -> None:
    values = flat(JOB.model_dump(mode="json"))
    assert redacted(dict.fromkeys(values, "value")) == dict.fromkeys(values, "value")


@pytest.mark.parametrize("value", ["true", "False", "", "null"])
def test_a_switch_is_no_secret(value: str) -> None:
    assert redacted(value, "hadoop.security.authorization") == value


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=c2VjcmV0==;EndpointSuffix=core.windows.net", "c2Vj"),
        ("SharedAccessSignature=sv=2024&sr=c&sig=c2VjcmV0%3D", "c2Vj"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEc2VjcmV0\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2VjcmV0c2VjcmV0 refused", "c2Vj"),
        ('{"private_key": "two words", "type": "service_account"}', "two words"),
        ("AIzaSyA-0123456789abcdefghijklmnopqrstu", "AIzaSyA"),
        ("github_pat_0123456789abcdefghij", "0123456789"),
    ],
)
def test_a_credential_is_known_by_its_shape(text: str, secret: str) -> None:
    assert secret not in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


CONF = dict.fromkeys(CREDENTIALS, "Zm9v-plain/looking+value=")


def test_no_report_and_no_message_of_a_run_shows_a_credential_of_sparks(tmp_path: Path) -> None:
    job = with_conf(**CONF)
    folder.claim(tmp_path, job)
    (tmp_path / "task.json").write_text("{}")
    report(tmp_path)
    facts = (tmp_path / "report.json").read_text()
    assert REDACTED in facts
    assert "Zm9v" not in facts + (tmp_path / "report.html").read_text()
    other = job.model_copy(update={"data": job.data.model_copy(update={"text": "body"})})
    assert "Zm9v" not in str(folder.differences(*(one.model_dump(mode="json") for one in (job, other))))


def test_a_wrong_value_is_not_quoted_where_it_is_a_secret() -> None:
    with pytest.raises(ConfigError, match="expected a string, got") as raised:
        load_job(
            None, data={"train": "t"}, model={"base": "m"}, engine={"spark": {"conf": {"fs.s3a.secret.key": ["Zm9v"]}}}
        )
    assert "Zm9v" not in str(raised.value)


def test_logs_of_ranks_hold_no_credential(tmp_path: Path) -> None:
    with metrics_log.log_file(tmp_path / "rank_0.jsonl", rank=0):
        log = logging.getLogger("torchlake.test")
        log.info("conf %s", "fs.s3a.secret.key=Zm9v")
        try:
            raise ValueError("https://user:Zm9v@host/")
        except ValueError:
            log.exception("refused")
    lines = [json.loads(line) for line in (tmp_path / "rank_0.jsonl").read_text().splitlines()]
    assert REDACTED in lines[0]["message"]
    assert REDACTED in lines[1]["traceback"]
    assert "Zm9v" not in str(lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_on_the_command_line_shows_no_credential(capfd: pytest.CaptureFixture[str], as_json: bool) -> None:
    words = ["predict", "no-such-folder/model", "s4://user:Zm9v@host/t.parquet?sig=Zm9v", "out"]
    assert main([*words, *(["--json"] if as_json else [])]) != 0
    shown = "".join(capfd.readouterr())
    assert shown
    assert "Zm9v" not in shown
