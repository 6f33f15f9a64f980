{{- define "kvproxy.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 57 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 57 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvproxy.selector" -}}
app.kubernetes.io/name: kvproxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvproxy.labels" -}}
{{ include "kvproxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvproxy.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "kvproxy.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "kvproxy.adminSecret" -}}
{{ .Values.admin.existingSecret | default (printf "%s-admin" (include "kvproxy.fullname" .)) }}
{{- end }}
