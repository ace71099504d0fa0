//! Requests: the policy of repeating them, and what a status means.

use std::thread;
use std::time::Duration;

use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::progress::{Event, Observer};

use super::{Config, HubError, RepoId};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// For an answer, or the next bytes of one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// How often and after which delays a request is made again. The delay doubles from `first` to
/// `longest`; a `Retry-After` that is longer holds, up to `longest`.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub retries: u32,
    pub first: Duration,
    pub longest: Duration,
}

impl Default for Patience {
    /// About ten minutes in all.
    fn default() -> Self {
        Self { retries: 8, first: Duration::from_secs(2), longest: Duration::from_secs(300) }
    }
}

impl Patience {
    fn delay(&self, tries: u32, retry_after: Option<Duration>) -> Duration {
        let doubled = self.first.saturating_mul(2u32.saturating_pow(tries));
        doubled.max(retry_after.unwrap_or_default()).min(self.longest)
    }

    /// Repeats `attempt` as long as its error can pass. An attempt that got somewhere, which it says
    /// by `Err((error, true))`, starts the count anew.
    pub(super) fn run<T>(
        &self,
        observer: &dyn Observer,
        mut attempt: impl FnMut() -> Result<T, (HubError, bool)>,
    ) -> Result<T, HubError> {
        let mut tries = 0;
        loop {
            let (error, advanced) = match attempt() {
                Ok(value) => return Ok(value),
                Err(failed) => failed,
            };
            tries = if advanced { 0 } else { tries };
            if !error.is_passing() || tries >= self.retries {
                return Err(error);
            }
            let delay = self.delay(tries, error.retry_after());
            observer.event(Event::Waiting { reason: &error.to_string(), seconds: delay.as_secs_f64() });
            thread::sleep(delay);
            tries += 1;
        }
    }
}

/// The client for transfers.
pub(super) struct Http {
    pub endpoint: String,
    client: Client,
    authorization: Option<HeaderValue>,
    pub patience: Patience,
}

impl Http {
    pub fn new(endpoint: String, config: &Config) -> Result<Self, HubError> {
        let client = Client::builder()
            .user_agent(&config.user_agent)
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT)
            .build()
            .map_err(HubError::connection)?;
        let authorization = config.token.as_ref().map(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.secret()))
                .map_err(|_| HubError::Answer { problem: "the token cannot be sent in a header".into() })?;
            value.set_sensitive(true);
            Ok(value)
        });
        Ok(Self { endpoint, client, authorization: authorization.transpose()?, patience: config.patience })
    }

    /// A request to the Hub itself, with the token. reqwest drops it on the way to another host.
    pub fn hub(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}/{path}", self.endpoint));
        match &self.authorization {
            Some(value) => request.header(AUTHORIZATION, value.clone()),
            None => request,
        }
    }

    /// A request to an address that the Hub gave: with the token only if it is the Hub's own.
    pub fn absolute(&self, method: Method, address: &str) -> RequestBuilder {
        match address.strip_prefix(&self.endpoint).and_then(|path| path.strip_prefix('/')) {
            Some(path) => self.hub(method, path),
            None => self.storage(method, address),
        }
    }

    /// A request to an address in storage, whose signature is all the right it needs.
    pub fn storage(&self, method: Method, address: &str) -> RequestBuilder {
        self.client.request(method, address)
    }
}

/// One attempt.
pub(super) fn once(repo: &RepoId, request: Result<RequestBuilder, HubError>) -> Result<Response, HubError> {
    let response = request?.send().map_err(HubError::connection)?;
    match response.status().is_success() {
        true => Ok(response),
        false => Err(failure(repo, response)),
    }
}

fn failure(repo: &RepoId, response: Response) -> HubError {
    let (status, headers) = (response.status(), response.headers().clone());
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let message = text("x-error-message").or_else(|| {
        let body: Value = serde_json::from_slice(&response.bytes().ok()?).ok()?;
        body.get("error")?.as_str().map(str::to_owned)
    });
    status_error(repo, status, text("x-error-code").as_deref(), message, retry_after(&headers))
}

/// What a failed answer means, by its status and the Hub's own code.
pub(super) fn status_error(
    repo: &RepoId,
    status: StatusCode,
    code: Option<&str>,
    message: Option<String>,
    retry_after: Option<Duration>,
) -> HubError {
    let repo = repo.clone();
    let message =
        message.unwrap_or_else(|| status.canonical_reason().unwrap_or("no reason given").to_owned());
    match (status.as_u16(), code) {
        (status @ (401 | 403), Some("GatedRepo")) => HubError::Gated { repo, status },
        (401, _) => HubError::Unauthorized { repo },
        (403, _) => HubError::Forbidden { repo, message },
        (404, Some("RevisionNotFound")) => HubError::NoRevision { repo, revision: String::new() },
        (404, Some("EntryNotFound")) => HubError::NoFile { repo, file: String::new() },
        (404, _) => HubError::NoRepository { repo },
        (429, _) => HubError::RateLimited { retry_after },
        (status @ (408 | 500..), _) => HubError::Server { status, retry_after },
        (status, _) => HubError::Refused { repo, status, message },
    }
}

/// A JSON answer.
pub(super) fn json<T: DeserializeOwned>(response: Response) -> Result<T, HubError> {
    let bytes = response.bytes().map_err(HubError::connection)?;
    serde_json::from_slice(&bytes).map_err(|error| HubError::Answer { problem: error.to_string() })
}

/// `text` as one part of a path.
pub(super) fn escaped(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
    let escape = |byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

/// Seconds; the form with a date is not used by the Hub.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn delays_double_and_honour_the_hub() {
        let patience = Patience::default();
        let seconds =
            |tries, after: Option<u64>| patience.delay(tries, after.map(Duration::from_secs)).as_secs();
        assert_eq!([0, 1, 2, 7].map(|tries| seconds(tries, None)), [2, 4, 8, 256]);
        assert_eq!([seconds(0, Some(90)), seconds(3, Some(1)), seconds(0, Some(9000))], [90, 16, 300]);
    }

    #[test]
    fn only_what_can_pass_is_tried_again() {
        let patience = Patience { retries: 3, first: Duration::ZERO, longest: Duration::ZERO };
        let tries = |error: fn() -> HubError| {
            let mut count = 0;
            let _ = patience.run(&Silent, || {
                count += 1;
                Err::<(), _>((error(), false))
            });
            count
        };
        assert_eq!(tries(|| HubError::RateLimited { retry_after: None }), 4);
        assert_eq!(tries(|| HubError::Server { status: 503, retry_after: None }), 4);
        assert_eq!(tries(|| HubError::NoFile { repo: "a/b".parse().unwrap(), file: "c".into() }), 1);
        assert_eq!(tries(|| HubError::Unauthorized { repo: "a/b".parse().unwrap() }), 1);
    }
}
