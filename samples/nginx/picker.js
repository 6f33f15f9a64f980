// Asks `kvproxy` where a request should go and reserves the place; nginx.conf settles it when the answer is through.
// Answers pass untouched, streams too: nothing of their bodies is read, so cached tokens are not learned.

async function carry(r) {
    let picked = null;
    try {
        const question = `{"reserve":true,"lease_s":3600,"path":${JSON.stringify(r.uri)},"request":${r.requestText}}`;
        const answer = await r.subrequest('/_picker/pick', {method: 'POST', body: question});
        if (answer.status === 429 || answer.status === 404) {
            r.headersOut['content-type'] = 'application/json';
            r.return(answer.status, answer.responseText);
            return;
        }
        if (answer.status === 201) {
            picked = JSON.parse(answer.responseText);
        }
    } catch (e) {
        r.error(`no pick: ${e}`);
    }
    if (picked === null) {  // fail open: without an answer of the picker, round robin
        r.internalRedirect('@any');
        return;
    }
    r.variables.picked = picked.url;
    r.variables.picked_rank = picked.headers['x-data-parallel-rank'] || '';
    r.variables.reservation = picked.reservation.id;
    r.internalRedirect('@picked');
}

export default {carry};
