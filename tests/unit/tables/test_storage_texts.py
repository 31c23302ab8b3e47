"""What is said about an error of a storage: the same for reading and for writing, whichever library tells it."""

import errno
import os

import pytest

from torchlake.errors import AccessError, StorageError, Unavailable
from torchlake.storage.errors import access_advice, storage_failure, unavailable

S3 = "Credentials come from AWS_ACCESS_KEY_ID"
NO_ACCESS = f"The credentials that were found have no access. {S3}"
BUCKET, REGION = "There is no such bucket: create it", "The bucket is in another region: set AWS_DEFAULT_REGION"


class NoCredentialsError(Exception):
    """As in botocore."""


class GatedRepoError(Exception):
    """As in huggingface_hub."""


OBSTORE = (
    "Generic S3 error: Error performing PUT https://s3/x in 3ms - Server returned non-2xx status code: {status}: "
    '<?xml version="1.0"?><Error><Code>{code}</Code></Error>\n\nDebug source:\nGeneric {{ credential: None }}'
)

FINAL = [
    (NoCredentialsError("Unable to locate them"), S3),
    (PermissionError(errno.EACCES, "No"), NO_ACCESS),
    (Exception(OBSTORE.format(status="403 Forbidden", code="AccessDenied")), NO_ACCESS),
    (Exception(OBSTORE.format(status="403 Forbidden", code="SignatureDoesNotMatch")), NO_ACCESS),
    (Exception("Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden"), S3),
    (Exception(OBSTORE.format(status="404 Not Found", code="NoSuchBucket")), BUCKET),
    (FileNotFoundError("The specified bucket does not exist"), BUCKET),
    (OSError(errno.EREMCHG, "Moved"), REGION),
    (Exception("HTTP status 301"), REGION),
]


@pytest.mark.parametrize(("error", "advice"), FINAL, ids=[str(error)[-30:] for error, _ in FINAL])
def test_what_a_retry_does_not_change_has_the_same_remedy_for_reading_and_for_writing(
    error: Exception, advice: str
) -> None:
    assert advice in str(unavailable("s3://lake/x", error))
    failure = storage_failure("s3://lake/x", error)
    assert isinstance(failure, AccessError)
    assert advice in str(failure)
    assert str(failure).endswith("Finished work is kept.")
    assert "Debug" not in str(failure)


def test_a_store_that_limits_requests_is_asked_again_later() -> None:
    error = Exception(OBSTORE.format(status="503 Slow Down", code="SlowDown"))
    for told in (unavailable("s3://lake/x", error), storage_failure("s3://lake/x", error)):
        assert "Run the same command again later, or with fewer processes" in str(told)
        assert not isinstance(told, AccessError)


@pytest.mark.parametrize("error", [ConnectionError("timed out"), Exception(OBSTORE.format(status="500", code="Busy"))])
def test_other_errors_are_for_a_retry(error: Exception) -> None:
    failure = storage_failure("s3://lake/x", error)
    assert str(failure).endswith("Run the same command again once the store answers: finished work is kept.")
    assert type(failure) is StorageError
    assert type(unavailable("s3://lake/x", error)) is Unavailable


def test_a_gated_repository_is_told_apart_from_a_missing_one() -> None:
    told = str(unavailable("hf://datasets/a/b", GatedRepoError("403 Client Error.\n\nAsk its owner.")))
    advice = "A private or gated repository needs credentials, which come from HF_TOKEN, or `hf auth login`."
    assert told == f"hf://datasets/a/b: 403 Client Error. {advice}"


def test_a_full_disk_is_told_with_the_space_that_is_free() -> None:
    failure = storage_failure("/tmp/table", f"Generic LocalFileSystem error: {os.strerror(errno.ENOSPC)} (os error 28)")
    assert "bytes are free there. Make room" in str(failure)
    assert access_advice("/tmp/table", PermissionError("No")) == ""


def test_names_of_files_are_not_taken_for_reasons() -> None:
    for error in (FileNotFoundError("lake/credentials.csv"), ConnectionError("lake/credentials.csv: timed out")):
        assert access_advice("s3://lake/credentials.csv", error) == ""


def test_the_password_of_a_url_is_not_shown() -> None:
    failure = str(storage_failure("hdfs://reader:hush%21@host/x", "no answer for reader:hush%21, or hush%21"))
    assert failure.startswith("hdfs://[redacted]@host/x: no answer")
    assert "hush" not in failure
