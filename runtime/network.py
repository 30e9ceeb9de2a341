"""Check that the Hugging Face hub is reachable, before its clients retry for half a minute."""
import http.client
import os
import ssl
import urllib.error
import urllib.request


def one_line(error):
    """Return an exception's message on one line."""
    return " ".join((str(error).strip() or type(error).__name__).split()).rstrip(".")


def reason(error):
    """Return on one line why the hub's client gave nothing."""
    offline = "OfflineModeIsEnabled" in str(error) or type(error).__name__ == "LocalEntryNotFoundError"
    return "it can't be reached, and the local cache has no copy" if offline else one_line(error)


def is_reachable():
    """Return whether the hub (HF_ENDPOINT) responds within five seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "false", ""):
        return False
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    # an HTTP error or an unknown certificate also means that it responds
    except urllib.error.URLError as e:
        return isinstance(e, urllib.error.HTTPError) or isinstance(e.reason, ssl.SSLError)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
