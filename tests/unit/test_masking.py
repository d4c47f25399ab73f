"""Secrets in texts are hidden, and nothing else is."""

from __future__ import annotations

import pytest

from embq.core.redaction import masked

S = "SECRETSECRETSECRET"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{S}@host:6379/0",
        f"unix://:{S}@/run/server.sock?db=1",
        f"rediss://user:{S}@{S}@host",
        f"rediss://host?db=0&password={S}",
        f"https://bucket.example/a.tar?X-Amz-Algorithm=A&X-Amz-Credential={S}&X-Amz-Signature={S}&x=1",
        f"https://x.example/a?Signature={S}&Key-Pair-Id={S}&Policy={S}",
        f"https://blob.example/a?sv=2024&sig={S}",
        f"https://storage.example/a?X-Goog-Signature={S}",
        f"https://x.example/a?access_token={S}, message='Forbidden'",
        f"{{'Authorization': 'Bearer {S}'}}",
        f"authorization: bearer {S}/+=",
        f"the token hf_{S} is not valid",
        f"AWS_SECRET_ACCESS_KEY={S}",
        f"{{'aws_secret_access_key': '{S}', 'b': 1}}",
        f'{{"password": "{S}"}}',
        f"password={S}",
        f"postgresql://host/db?sslmode=require&sslpassword={S}",
        f"host=db sslpassword={S} user=me",
        f"redis://{S}{S}@host:6379",
        f"OPENAI_API_KEY={S}",
        f"WANDB_API_KEY: {S}",
        f"X-Api-Key: {S}",
        f"PGPASSWORD={S} psql",
        f'password="two words {S}"',
        f"{{'api_key': 'two words {S}'}}",
    ],
)
def test_a_secret_is_hidden_and_the_rest_stays(text: str) -> None:
    hidden = masked(text)
    assert S not in hidden
    assert "****" in hidden
    assert masked(hidden) == hidden, "twice is once"
    assert set(text.split(S)[0][:8]) <= set(hidden)


@pytest.mark.parametrize(
    "text",
    [
        "redis://host:6379/0",
        "redis://user@host and mail@example.org",
        "unix:///a/b.sock",
        "s3://bucket/folder/00000.tar",
        "https://example.org/a.jpg?size=12&name=policy",
        "EMBQ_BROKER_PASSWORD_FILE=/run/secrets/embq/password",
        "put the password into EMBQ_BROKER_PASSWORD_FILE",
        "budget_chosen tokens=4096 tokens_per_s=12345",
        "hf_hub_download failed, hf:./model, hf_transfer",
        "a bearer of news; basic types",
        "token=1-0:worker:abcdef",
    ],
)
def test_what_is_no_secret_is_left_as_it_is(text: str) -> None:
    assert masked(text) == text
