"""Whether the Hugging Face hub is there, asked before its clients spend half a minute on finding out."""
import http.client
import os
import ssl
import urllib.error
import urllib.request


def reason(error):
    """What one of its clients says, on one line."""
    return " ".join((str(error).strip() or type(error).__name__).split()).rstrip(".")


def answers():
    """Whether the hub (HF_ENDPOINT) answers at all within five seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "false", ""):
        return False
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    # a refusal is an answer; so is a certificate that Python lacks
    except urllib.error.URLError as e:
        return isinstance(e, urllib.error.HTTPError) or isinstance(e.reason, ssl.SSLError)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
